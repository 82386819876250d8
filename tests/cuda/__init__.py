"""The CUDA path without a GPU: fake tensors, recording doubles, what the compilers say."""
