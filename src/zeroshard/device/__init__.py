"""What differs between the CPU, CUDA and the other accelerators that torch knows."""
