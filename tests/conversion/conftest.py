"""What several tests of conversion set up."""

import pytest
import torch


@pytest.fixture
def two_threads():
    """Let PyTorch use two threads, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
