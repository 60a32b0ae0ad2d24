"""The `rayrec` command. Subcommands import what they need when they run."""
