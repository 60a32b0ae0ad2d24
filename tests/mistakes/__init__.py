"""Every mistake that a user can make at the commands of rayrec, and how each of them must end.

`python -m tests.mistakes` tries all of them; see `__main__` for its options. A mistake is a line of
a table: the command, the options, and what the last line on standard error must say. The tables lie
in one module per command or per kind of file.

| module | holds |
|---|---|
| case | what a mistake is, and what is wrong with how a command ended |
| sound | good files and good command lines, which the mistakes spoil |
| spoil | ways to spoil a file |
| run | how commands are started, bounded and looked at |
| report | the table by command |
"""
