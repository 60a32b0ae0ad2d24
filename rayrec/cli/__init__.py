"""The `rayrec` command. Subcommands are loaded, and import what they need, when they run."""
