#pragma once
#include <functional>
#include <string>

// simt_run runs a kernel for every block of the grid and returns what went wrong, or nothing.
std::string simt_run(const unsigned grid[3], unsigned threads, const std::function<void()> &kernel);
unsigned simt_tid();
unsigned simt_block(int axis);
unsigned simt_grid(int axis);
unsigned simt_threads();
void simt_barrier();
float simt_shfl_xor(float v, unsigned lane_mask);
