"""Plans of copies: what they load is what the model's own loaders load; models that do more get none."""

import torch

from generators.weights.inplace import Named, is_simple, prove_plan


class Fused(torch.nn.Module):
    """Two offered tensors in one parameter, one in another, padding rows that stay zero."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self.padded = torch.nn.Parameter(torch.zeros(5, 4), requires_grad=False)

    def load_weights(self, tensors: Named) -> None:
        for name, tensor in tensors:
            if name == "embed":
                self.padded.data[:3].copy_(tensor)
            else:
                self.fused.data.narrow(0, 0 if name == "q" else 2, tensor.shape[0]).copy_(tensor)


def offered(seed: int) -> list[tuple[str, torch.Tensor]]:
    """Views into one buffer, as a stage holds them."""
    buffer = torch.randn(64, generator=torch.Generator().manual_seed(seed))
    return [("q", buffer[:8].view(2, 4)), ("k", buffer[8:24].view(4, 4)), ("embed", buffer[32:44].view(3, 4))]


def test_plan_loads_what_the_loaders_load_in_any_order() -> None:
    model, reference = Fused(), Fused()
    model.load_weights(offered(0))
    plan = prove_plan(model, offered(0), model.load_weights)
    assert plan is not None
    new = offered(1)
    reference.load_weights(new)
    assert plan.fits(new[::-1])
    plan.load(new[::-1])
    assert torch.equal(model.fused, reference.fused) and torch.equal(model.padded, reference.padded)
    assert not plan.fits(new[:2])


def test_casts_are_part_of_a_plan() -> None:
    model = Fused().to(torch.bfloat16)
    model.load_weights(offered(0))
    plan = prove_plan(model, offered(0), model.load_weights)
    assert plan is not None
    plan.load(offered(1))
    assert torch.equal(model.fused[:2], offered(1)[0][1].to(torch.bfloat16))


def test_no_plan_when_a_loader_computes() -> None:
    class Scaling(Fused):
        def load_weights(self, tensors: Named) -> None:
            super().load_weights([(name, tensor * 2) for name, tensor in tensors])

    model = Scaling()
    model.load_weights(offered(0))
    assert prove_plan(model, offered(0), model.load_weights) is None


def test_no_plan_when_a_loader_writes_without_copying() -> None:
    class Filling(Fused):
        def load_weights(self, tensors: Named) -> None:
            super().load_weights(tensors)
            self.padded.data[3:].fill_(1.0)

    model = Filling()
    model.load_weights(offered(0))
    assert prove_plan(model, offered(0), model.load_weights) is None


def test_quantized_layers_are_not_simple() -> None:
    model = Fused()
    assert is_simple(model)
    model.quant_method = type("Fp8LinearMethod", (), {})()
    assert not is_simple(model)
