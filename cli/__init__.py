"""The `minisgl` command. Installed under the import name `minisgl_cli`; each command has a file of its own."""
