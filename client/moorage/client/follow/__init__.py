"""Follow jobs: receive their events and output, merge them, and ask the leader for what was missed."""
