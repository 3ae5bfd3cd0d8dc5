"""The host's GPUs: who leases which, their health, and the readers that find them."""
