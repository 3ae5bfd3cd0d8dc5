"""The operating system as moorage uses it: processes, cgroups, private files, archives, loops, logs."""
