#include "philox.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>

namespace ckptkern {
namespace {

constexpr uint32_t kMultiplier0 = 0xD2511F53;
constexpr uint32_t kMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kWeyl0 = 0x9E3779B9;
constexpr uint32_t kWeyl1 = 0xBB67AE85;

constexpr int64_t kLanes = 64; // counters per call: 8 blocks of 32 columns
constexpr int64_t kBlockCols = 4 * kLanes;
constexpr int64_t kBlockRows = 16;
constexpr int64_t kGrain = 8; // blocks per thread: 32768 elements, about 30 us

inline void philox_round(uint32_t& c0, uint32_t& c1, uint32_t& c2, uint32_t& c3, uint32_t k0, uint32_t k1) {
  const uint64_t product0 = static_cast<uint64_t>(kMultiplier0) * c0;
  const uint64_t product1 = static_cast<uint64_t>(kMultiplier1) * c2;
  c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
  c1 = static_cast<uint32_t>(product1);
  c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
  c3 = static_cast<uint32_t>(product0);
}

inline void philox_rounds(uint32_t& c0, uint32_t& c1, uint32_t& c2, uint32_t& c3, uint32_t k0, uint32_t k1) {
#pragma GCC unroll 10
  for (uint32_t round = 0; round < 10; ++round) {
    philox_round(c0, c1, c2, c3, k0 + round * kWeyl0, k1 + round * kWeyl1);
  }
}

// One row of counters c0 .. c0 + 63: 256 columns of row r (low halves, keep_lo) and of row r + 8
// (high halves, keep_hi).
void keep_two_rows(
    uint32_t k0,
    uint32_t k1,
    uint32_t c0,
    uint32_t c1,
    uint32_t c2,
    uint32_t c3,
    int32_t threshold,
    uint8_t* __restrict__ keep_lo,
    uint8_t* __restrict__ keep_hi) {
  alignas(64) uint32_t words[4][kLanes];
  for (int64_t i = 0; i < kLanes; ++i) {
    uint32_t x0 = c0 + static_cast<uint32_t>(i), x1 = c1, x2 = c2, x3 = c3;
    philox_rounds(x0, x1, x2, x3, k0, k1);
    words[0][i] = x0;
    words[1][i] = x1;
    words[2][i] = x2;
    words[3][i] = x3;
  }
  // Flat compare, then moves of 8 bytes: the loops over the final layout would not vectorise.
  alignas(64) uint8_t flat[2][kLanes];
  for (int64_t word = 0; word < 4; ++word) {
    for (int64_t i = 0; i < kLanes; ++i) {
      flat[0][i] = static_cast<int32_t>(words[word][i] & 0xFFFF) >= threshold;
      flat[1][i] = static_cast<int32_t>(words[word][i] >> 16) >= threshold;
    }
    for (int64_t block = 0; block < kLanes / 8; ++block) {
      std::memcpy(keep_lo + 32 * block + 8 * word, flat[0] + 8 * block, 8);
      std::memcpy(keep_hi + 32 * block + 8 * word, flat[1] + 8 * block, 8);
    }
  }
}

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

} // namespace

at::Tensor keep_mask_cpu(
    const at::Tensor& state,
    int64_t threshold,
    int64_t planes,
    int64_t rows,
    int64_t cols,
    int64_t plane_base,
    int64_t row_base,
    int64_t col_base,
    int64_t total_rows) {
  TORCH_CHECK(
      state.is_cpu() && state.scalar_type() == at::kLong && state.dim() == 1 && state.size(0) == 2,
      "keep_mask: state must be a CPU int64 tensor of shape [2] but is ",
      state.toString(),
      " of shape ",
      state.sizes());
  TORCH_CHECK(threshold >= 0 && threshold <= 65536, "keep_mask: threshold must lie in [0, 65536] but is ", threshold);
  TORCH_CHECK(
      planes >= 0 && rows >= 0 && cols >= 0 && plane_base >= 0 && row_base >= 0 && col_base >= 0,
      "keep_mask: sizes and bases must not be negative but are planes=",
      planes,
      ", rows=",
      rows,
      ", cols=",
      cols,
      ", plane_base=",
      plane_base,
      ", row_base=",
      row_base,
      ", col_base=",
      col_base);
  TORCH_CHECK(
      total_rows >= row_base + rows,
      "keep_mask: total_rows=",
      total_rows,
      " is less than row_base + rows = ",
      row_base + rows,
      ": rows would share their values with the next plane");

  at::Tensor mask = at::empty({planes, rows, cols}, at::TensorOptions().dtype(at::kBool));
  if (mask.numel() == 0) {
    return mask;
  }
  const at::Tensor words = state.contiguous();
  const int64_t* state_data = words.const_data_ptr<int64_t>();
  const uint64_t key = static_cast<uint64_t>(state_data[0]);
  const uint64_t stream = static_cast<uint64_t>(state_data[1]);
  const uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  const uint32_t c2 = static_cast<uint32_t>(stream), c3 = static_cast<uint32_t>(stream >> 32);

  // Work is cut into blocks of 16 rows x 256 columns that start at multiples of 16 rows and 32 columns.
  const int64_t first_row_block = row_base / kBlockRows;
  const int64_t row_blocks = ceil_div(row_base + rows, kBlockRows) - first_row_block;
  const int64_t first_col = col_base / 32 * 32;
  const int64_t col_blocks = ceil_div(col_base + cols - first_col, kBlockCols);
  const int64_t blocks_per_plane = ceil_div(total_rows, kBlockRows);
  uint8_t* out = reinterpret_cast<uint8_t*>(mask.mutable_data_ptr<bool>());

  at::parallel_for(0, planes * row_blocks * col_blocks, kGrain, [&](int64_t begin, int64_t end) {
    alignas(64) uint8_t keep[2][kBlockCols];
    for (int64_t item = begin; item < end; ++item) {
      const int64_t plane = item / (row_blocks * col_blocks);
      const int64_t row_block = first_row_block + item / col_blocks % row_blocks;
      const int64_t block_col = first_col + item % col_blocks * kBlockCols;
      const int64_t col_begin = std::max(block_col, col_base);
      const int64_t col_end = std::min(block_col + kBlockCols, col_base + cols);
      const uint64_t c1_block = static_cast<uint64_t>(plane_base + plane) * blocks_per_plane + row_block;
      for (int64_t lane_row = 0; lane_row < 8; ++lane_row) {
        const int64_t row_lo = row_block * kBlockRows + lane_row - row_base;
        const bool wants[2] = {row_lo >= 0 && row_lo < rows, row_lo + 8 >= 0 && row_lo + 8 < rows};
        if (!wants[0] && !wants[1]) {
          continue;
        }
        keep_two_rows(
            k0,
            k1,
            static_cast<uint32_t>(8 * (block_col / 32)),
            static_cast<uint32_t>(8 * c1_block + lane_row),
            c2,
            c3,
            static_cast<int32_t>(threshold),
            keep[0],
            keep[1]);
        for (int half = 0; half < 2; ++half) {
          if (wants[half]) {
            std::memcpy(
                out + (plane * rows + row_lo + 8 * half) * cols + (col_begin - col_base),
                keep[half] + (col_begin - block_col),
                col_end - col_begin);
          }
        }
      }
    }
  });
  return mask;
}

} // namespace ckptkern
