"""The torch twins of the Triton kernels: specification, oracle and CPU path."""
