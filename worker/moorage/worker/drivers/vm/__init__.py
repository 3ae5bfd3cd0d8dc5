"""Run a job in a virtual machine: a runner starts QEMU, and the guest's first process runs the job's command."""
