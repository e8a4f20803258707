"""What crosses a process boundary: messages, framing, sockets, authentication, versions, settings, metric names."""
