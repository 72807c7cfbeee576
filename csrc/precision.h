// The settings that decide the precision of a recomputed operation: read in forward, restored around backward.
#pragma once

#include <ATen/autocast_mode.h>

#include <array>
#include <cstdint>

namespace ckptkern {

// Autocast belongs to a thread. Entries follow at::autocast's own list of device types.
struct AutocastState {
  std::array<at::ScalarType, at::autocast::_AUTOCAST_SUPPORTED_DEVICES.size()> dtype;
  uint32_t enabled = 0; // bit i: device type i
  bool cache = false;

  static AutocastState current();
  bool operator==(const AutocastState& other) const;
  // Makes this state current, given the one that is.
  void replace(const AutocastState& now) const;
};

// Settings of the whole process, one small integer each: the fp32 precision of matmul, conv and rnn
// (CUDA and oneDNN), reduced-precision reduction and accumulation, deterministic mode, default dtype,
// which kernels of scaled_dot_product_attention may run, and in which order they are tried.
constexpr std::size_t kProcessSettings = 19;
using ProcessState = std::array<int8_t, kProcessSettings>;

// A snapshot of all of the above, taken by the constructor. enter() makes it current and exit()
// restores what enter() changed. Re-entrant, and usable from any thread. Where guards of several threads
// overlap, whatever the order in which they leave, the process ends with the settings from before the
// first of them.
class Precision {
 public:
  Precision();

  void enter() const;
  // Raises unless this is the guard that this thread entered last.
  void exit() const;

 private:
  AutocastState autocast_;
  ProcessState process_;
};

} // namespace ckptkern
