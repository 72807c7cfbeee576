// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) and the
// dropout masks that every backend derives from it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace ckptkern {

// Returns a bool CPU tensor [planes, rows, cols], true = keep. Element (plane, row, col), counted from
// the three bases, reads the 16-bit value
//
//   key  = state[0]
//   c0   = 8 * (col >> 5) + (col & 7)
//   c1   = 8 * (plane * ceil(total_rows / 16) + (row >> 4)) + (row & 7)
//   c2,3 = low, high word of state[1]
//   word = (col >> 3) & 3,  half = (row >> 3) & 1 (0 = low 16 bits)
//
// of Philox4x32-10(key, c). Known answer: key 0, counter 0 -> 6627e8d5 e169c58d bc57ac4c 9b00dbd8. It
// is true iff value >= threshold. Counter words wrap modulo 2^32. Raises if a size or base is
// negative, threshold is outside [0, 65536], total_rows < row_base + rows, or state is not a CPU
// int64[2].
at::Tensor keep_mask_cpu(
    const at::Tensor& state,
    int64_t threshold,
    int64_t planes,
    int64_t rows,
    int64_t cols,
    int64_t plane_base,
    int64_t row_base,
    int64_t col_base,
    int64_t total_rows);

} // namespace ckptkern
