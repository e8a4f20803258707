"""What produces tokens: vLLM in this process, an OpenAI-compatible server, or a script."""

from generators.backends.base import Backend
from protocol.config import Config


def make_backend(config: Config, *, name: str) -> Backend:
    """The back end that `generators.backend` asks for; imports only that one's packages."""
    if config.generators.backend == "vllm":
        from generators.backends.vllm import VllmBackend

        return VllmBackend(config, name=name)
    if config.generators.backend == "openai":
        from generators.backends.openai import OpenAIBackend

        return OpenAIBackend(config, name=name)
    from generators.backends.scripted import ScriptedBackend

    return ScriptedBackend(config, name=name)
