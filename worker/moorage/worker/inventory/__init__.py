"""What is in this machine: devices in slot order, their load and health, and when their memory is free again."""
