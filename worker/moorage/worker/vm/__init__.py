"""A job in a virtual machine: the runner starts QEMU for it, and the guest's first process runs the job's command."""
