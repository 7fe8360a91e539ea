"""The round protocol, without torch: membership, quorum, and the exchange that applies both."""
