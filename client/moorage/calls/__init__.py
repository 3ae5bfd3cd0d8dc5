"""The member of a service: takes calls from NATS, hands them to a program that it starts, and sends the answers."""
