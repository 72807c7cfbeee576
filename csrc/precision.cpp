#include "precision.h"

#include <ATen/Context.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/ScalarTypeToTypeMeta.h>
#include <c10/util/irange.h>

#include <list>
#include <mutex>
#include <numeric>
#include <optional>
#include <vector>

namespace ckptkern {
namespace {

using at::Float32Backend;
using at::Float32Op;
using at::Float32Precision;

constexpr auto& kDeviceTypes = at::autocast::_AUTOCAST_SUPPORTED_DEVICES;

// One setting of the process. `read` gives the value in effect, which is what a snapshot compares;
// `raw` gives what has to be written to restore the setting, if that differs.
struct Setting {
  int8_t (*read)();
  int8_t (*raw)();
  void (*write)(int8_t);
};

// --- fp32 precision. torch resolves (backend, op) through (backend, all) and (generic, all), and its
// getter returns only the resolved value. Only the newer interface is used, because once it has been
// written, reading the older flags raises.

Float32Precision resolved(Float32Backend backend, Float32Op op) {
  return at::globalContext().float32Precision(backend, op);
}

void set_float32(Float32Backend backend, Float32Op op, Float32Precision precision) {
  at::globalContext().setFloat32Precision(backend, op, precision);
}

// From torch 2.13 on an untouched conv or rnn holds an internal default that cannot be written: TF32,
// unless a parent is set. This value represents it.
constexpr int8_t kImplicit = 100;

template <Float32Backend B, Float32Op O>
int8_t read_float32() {
  const Float32Precision precision = resolved(B, O);
  // "Not set" runs as IEEE. Written as IEEE it does so under any parent.
  return static_cast<int8_t>(precision == Float32Precision::NONE ? Float32Precision::IEEE : precision);
}

template <Float32Backend B, Float32Op O>
void write_float32(int8_t precision) {
  set_float32(B, O, static_cast<Float32Precision>(precision));
}

// True if (backend, op) takes its value from (parent_backend, all), that is, if it changes with it.
// Leaves the parent at TF32.
bool follows(Float32Backend backend, Float32Op op, Float32Backend parent_backend) {
  set_float32(parent_backend, Float32Op::ALL, Float32Precision::IEEE);
  const Float32Precision under_ieee = resolved(backend, op);
  set_float32(parent_backend, Float32Op::ALL, Float32Precision::TF32);
  return under_ieee != resolved(backend, op);
}

template <Float32Backend B>
int8_t raw_float32_parent() {
  const Float32Precision generic = resolved(Float32Backend::GENERIC, Float32Op::ALL);
  const Float32Precision own = resolved(B, Float32Op::ALL);
  const bool inherits = follows(B, Float32Op::ALL, Float32Backend::GENERIC);
  set_float32(Float32Backend::GENERIC, Float32Op::ALL, generic);
  return static_cast<int8_t>(inherits ? Float32Precision::NONE : own);
}

// Finds what (B, O) itself holds, by changing its parents for a moment. Runs only when the setting is
// about to be overwritten, so that an inherited value is inherited again after the guard.
template <Float32Backend B, Float32Op O>
int8_t raw_float32() {
  const Float32Precision generic = resolved(Float32Backend::GENERIC, Float32Op::ALL);
  const auto parent = static_cast<Float32Precision>(raw_float32_parent<B>());
  auto own = static_cast<int8_t>(resolved(B, O));
  if (follows(B, O, B)) {
    set_float32(Float32Backend::GENERIC, Float32Op::ALL, Float32Precision::NONE);
    set_float32(B, Float32Op::ALL, Float32Precision::NONE);
    const Float32Precision alone = resolved(B, O);
    own = alone == Float32Precision::NONE ? static_cast<int8_t>(alone) : kImplicit;
  }
  set_float32(B, Float32Op::ALL, parent);
  set_float32(Float32Backend::GENERIC, Float32Op::ALL, generic);
  return own;
}

template <Float32Backend B, Float32Op O>
constexpr Setting float32_setting() {
  return {read_float32<B, O>, raw_float32<B, O>, write_float32<B, O>};
}

// --- reductions and accumulation

template <at::CuBLASReductionOption (at::Context::*Get)() const, void (at::Context::*Set)(bool, bool)>
constexpr Setting reduction_setting() {
  constexpr auto read = +[]() -> int8_t { return static_cast<int8_t>((at::globalContext().*Get)()); };
  return {read, read, +[](int8_t value) {
            const auto option = static_cast<at::CuBLASReductionOption>(value);
            (at::globalContext().*Set)(
                option == at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK,
                option != at::CuBLASReductionOption::DisallowReducedPrecisionDisallowSplitK);
          }};
}

template <bool (at::Context::*Get)() const, void (at::Context::*Set)(bool)>
constexpr Setting flag_setting() {
  constexpr auto read = +[]() -> int8_t { return (at::globalContext().*Get)(); };
  return {read, read, +[](int8_t value) { (at::globalContext().*Set)(value != 0); }};
}

// --- deterministic mode: bit 0 on, bit 1 warn only

int8_t read_deterministic() {
  const at::Context& context = at::globalContext();
  return static_cast<int8_t>(
      (context.deterministicAlgorithms() ? 1 : 0) | (context.deterministicAlgorithmsWarnOnly() ? 2 : 0));
}

void write_deterministic(int8_t value) {
  at::globalContext().setDeterministicAlgorithms((value & 1) != 0, (value & 2) != 0);
}

int8_t read_default_dtype() {
  return static_cast<int8_t>(c10::get_default_dtype_as_scalartype());
}

void write_default_dtype(int8_t value) {
  c10::set_default_dtype(c10::scalarTypeToTypeMeta(static_cast<at::ScalarType>(value)));
}

// --- the order of attention's kernels: the number of a permutation, in the factorial number system

constexpr int kAttentionKernels = at::num_sdp_backends;
static_assert(kAttentionKernels <= 5, "the number of a permutation of six does not fit into int8_t");

int8_t read_attention_order() {
  const auto order = at::globalContext().sDPPriorityOrder();
  int number = 0;
  for (const auto i : c10::irange(kAttentionKernels)) {
    int smaller = 0; // entries that follow
    for (const auto j : c10::irange(i + 1, kAttentionKernels)) {
      smaller += order[j] < order[i] ? 1 : 0;
    }
    number = number * (kAttentionKernels - i) + smaller;
  }
  return static_cast<int8_t>(number);
}

void write_attention_order(int8_t value) {
  std::array<int, kAttentionKernels> smaller{};
  int number = value;
  for (int i = kAttentionKernels - 1; i >= 0; --i) {
    smaller[i] = number % (kAttentionKernels - i);
    number /= kAttentionKernels - i;
  }
  std::vector<int64_t> left(kAttentionKernels), order;
  std::iota(left.begin(), left.end(), 0);
  for (const int place : smaller) {
    order.push_back(left[place]);
    left.erase(left.begin() + place);
  }
  at::globalContext().setSDPPriorityOrder(order);
}

constexpr std::size_t kCudaConv = 1;
constexpr std::size_t kCudaRnn = 2;
constexpr std::array<Setting, kProcessSettings> kSettings = {{
    float32_setting<Float32Backend::CUDA, Float32Op::MATMUL>(),
    float32_setting<Float32Backend::CUDA, Float32Op::CONV>(),
    float32_setting<Float32Backend::CUDA, Float32Op::RNN>(),
    float32_setting<Float32Backend::MKLDNN, Float32Op::MATMUL>(),
    float32_setting<Float32Backend::MKLDNN, Float32Op::CONV>(),
    float32_setting<Float32Backend::MKLDNN, Float32Op::RNN>(),
    reduction_setting<&at::Context::allowFP16ReductionCuBLAS, &at::Context::setAllowFP16ReductionCuBLAS>(),
    reduction_setting<&at::Context::allowBF16ReductionCuBLAS, &at::Context::setAllowBF16ReductionCuBLAS>(),
    flag_setting<&at::Context::allowFP16AccumulationCuBLAS, &at::Context::setAllowFP16AccumulationCuBLAS>(),
    flag_setting<&at::Context::allowFP16ReductionCPU, &at::Context::setAllowFP16ReductionCPU>(),
    flag_setting<&at::Context::allowFP16BF16ReductionMathSDP, &at::Context::setAllowFP16BF16ReductionMathSDP>(),
    {read_deterministic, read_deterministic, write_deterministic},
    {read_default_dtype, read_default_dtype, write_default_dtype},
    flag_setting<&at::Context::userEnabledFlashSDP, &at::Context::setSDPUseFlash>(),
    flag_setting<&at::Context::userEnabledMemEfficientSDP, &at::Context::setSDPUseMemEfficient>(),
    flag_setting<&at::Context::userEnabledMathSDP, &at::Context::setSDPUseMath>(),
    flag_setting<&at::Context::userEnabledCuDNNSDP, &at::Context::setSDPUseCuDNN>(),
    flag_setting<&at::Context::userEnabledOverrideableSDP, &at::Context::setSDPUseOverrideable>(),
    {read_attention_order, read_attention_order, write_attention_order},
}};

ProcessState current_process_state() {
  ProcessState state;
  for (const auto i : c10::irange(kProcessSettings)) {
    state[i] = kSettings[i].read();
  }
  return state;
}

// The raw values that one guard overwrote and must write back; kUntouched where it overwrote nothing. The last
// entry is (cuda, all).
constexpr int8_t kUntouched = -1;
constexpr std::size_t kCudaAll = kProcessSettings;
using Debt = std::array<int8_t, kProcessSettings + 1>;

void write_cuda_all(int8_t precision) {
  set_float32(Float32Backend::CUDA, Float32Op::ALL, static_cast<Float32Precision>(precision));
}

// Makes `wanted` current and notes in `debt` what it overwrites, also when a write raises.
void impose(const ProcessState& wanted, Debt& debt) {
  // An implicit setting could not be written back, so it is not overwritten: its parent is. All implicit
  // settings agree on the parent, now as in the snapshot, because no setting can become implicit.
  for (const auto i : {kCudaConv, kCudaRnn}) {
    if (kSettings[i].read() != wanted[i] && kSettings[i].raw() == kImplicit) {
      debt[kCudaAll] = raw_float32_parent<Float32Backend::CUDA>();
      write_cuda_all(wanted[i]);
    }
  }
  for (const auto i : c10::irange(kProcessSettings)) {
    if (kSettings[i].read() != wanted[i]) {
      const int8_t owed = kSettings[i].raw();
      kSettings[i].write(wanted[i]); // a flag that this CPU does not support raises here
      debt[i] = owed;
    }
  }
}

void repay(const Debt& debt) {
  for (const auto i : c10::irange(kProcessSettings)) {
    if (debt[i] != kUntouched) {
      kSettings[i].write(debt[i]);
    }
  }
  if (debt[kCudaAll] != kUntouched) {
    write_cuda_all(debt[kCudaAll]);
  }
}

// Guards of all threads that may have settings to write back, oldest first.
struct Ledger {
  using Entry = std::list<Debt>::iterator;

  std::mutex mutex;
  std::list<Debt> debts;

  // No entry if nothing differs and no other guard is open.
  std::optional<Entry> enter(const ProcessState& wanted) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (debts.empty() && current_process_state() == wanted) {
      return std::nullopt;
    }
    Debt debt;
    debt.fill(kUntouched);
    try {
      impose(wanted, debt);
    } catch (...) {
      repay(debt);
      throw;
    }
    return debts.insert(debts.end(), debt);
  }

  void exit(Entry entry) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto later = std::next(entry);
    if (later == debts.end()) {
      repay(*entry);
    } else { // a younger guard of another thread is still open: it writes back for us
      for (const auto i : c10::irange(entry->size())) {
        if ((*entry)[i] != kUntouched) {
          (*later)[i] = (*entry)[i];
        }
      }
    }
    debts.erase(entry);
  }
};

Ledger& ledger() {
  static Ledger instance;
  return instance;
}

struct Frame {
  const Precision* owner;
  std::optional<AutocastState> outer;
  std::optional<Ledger::Entry> debt;
  bool nested; // counted as an autocast region
};

std::vector<Frame>& frames() {
  thread_local std::vector<Frame> instance;
  return instance;
}

} // namespace

AutocastState AutocastState::current() {
  AutocastState state;
  for (const auto i : c10::irange(kDeviceTypes.size())) {
    state.dtype[i] = at::autocast::get_autocast_dtype(kDeviceTypes[i]);
    state.enabled |= static_cast<uint32_t>(at::autocast::is_autocast_enabled(kDeviceTypes[i])) << i;
  }
  state.cache = at::autocast::is_autocast_cache_enabled();
  return state;
}

bool AutocastState::operator==(const AutocastState& other) const {
  return enabled == other.enabled && cache == other.cache && dtype == other.dtype;
}

void AutocastState::replace(const AutocastState& now) const {
  for (const auto i : c10::irange(kDeviceTypes.size())) {
    if (dtype[i] != now.dtype[i]) {
      at::autocast::set_autocast_dtype(kDeviceTypes[i], dtype[i]);
    }
    const bool wanted = (enabled >> i & 1) != 0;
    if (wanted != ((now.enabled >> i & 1) != 0)) {
      at::autocast::set_autocast_enabled(kDeviceTypes[i], wanted);
    }
  }
  if (cache != now.cache) {
    at::autocast::set_autocast_cache_enabled(cache);
  }
}

Precision::Precision() : autocast_(AutocastState::current()), process_(current_process_state()) {}

void Precision::enter() const {
  Frame frame{this, std::nullopt, ledger().enter(process_), autocast_.enabled != 0};
  const AutocastState now = AutocastState::current();
  if (!(now == autocast_)) {
    autocast_.replace(now);
    frame.outer = now;
  }
  if (frame.nested) {
    at::autocast::increment_nesting();
  }
  frames().push_back(frame);
}

void Precision::exit() const {
  TORCH_CHECK(
      !frames().empty() && frames().back().owner == this,
      "Precision: guards must be left by the thread that entered them, last entered first");
  const Frame frame = frames().back();
  frames().pop_back();
  if (frame.outer) {
    // The body's own changes are undone too, so compare with the present settings.
    frame.outer->replace(AutocastState::current());
  }
  // As in torch.autocast, the cache of cast weights does not outlive the outermost region. Autograd's
  // thread is not in a region and would never free them.
  if (frame.nested && at::autocast::decrement_nesting() == 0) {
    at::autocast::clear_cache();
  }
  if (frame.debt) {
    ledger().exit(*frame.debt);
  }
}

} // namespace ckptkern
