"""What a daemon tells its senders: the coordinator's own figures, passed on."""

from protocol.messages import HeartbeatAck, Hello, Refused, Welcome


def welcome(hello: Hello, *, known: Welcome, name: str, incarnation: str) -> Welcome | Refused:
    """Answer to a sender's hello; one of another run is refused."""
    if hello.run_id is not None and hello.run_id != known.run_id:
        reason = f"{hello.name} belongs to run {hello.run_id}, this daemon to {known.run_id}"
        return Refused(code="run_id", reason=reason)
    return Welcome(
        server=name,
        incarnation=incarnation,
        run_id=known.run_id,
        policy_version=known.policy_version,
        published_version=known.published_version,
        run_state=known.run_state,
    )


def heartbeat_ack(known: Welcome | HeartbeatAck) -> HeartbeatAck:
    """Answer to a sender's heartbeat."""
    return HeartbeatAck(
        policy_version=known.policy_version, published_version=known.published_version, run_state=known.run_state
    )
