"""The vLLM generation service: engine adapter, sampling, weight receiver, other back ends."""
