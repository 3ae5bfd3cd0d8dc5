"""What every verb stands on: arguments, options, settings, codes, what is written and how it looks."""
