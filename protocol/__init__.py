"""What crosses a process boundary: messages, framing, sockets, authentication, versions, configuration, metric names."""
