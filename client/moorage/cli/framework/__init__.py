"""What every verb stands on: arguments, options, settings, exit codes, and how output looks."""
