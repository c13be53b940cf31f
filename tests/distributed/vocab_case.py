"""Input of the vocabulary-parallel tests, made by the ranks and by the test that knows the answer."""

import torch


def vocab_case_data(
    vocab_size: int, padded: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [3, 5, padded] with large values in the padding, labels [3, 5] in every part, weights [2, 3, 5]."""
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn((3, 5, padded), generator=generator, dtype=torch.float64) * 4
    logits[..., vocab_size:] = 50.0
    labels = torch.randint(0, vocab_size, (3, 5), generator=generator)
    labels[0, 0], labels[0, 1] = 0, vocab_size - 1
    weights = torch.randn((2, 3, 5), generator=generator, dtype=torch.float64)
    return logits.to(dtype), labels, weights
