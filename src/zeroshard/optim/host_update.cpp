// The update of a shard in host memory: norms of 16-bit gradients, and Adam and AdamW over the spans of the
// shard in one pass over memory.
//
// The results equal those of torch's CPU kernels bit for bit: the same operations in the same order, and a
// fused multiply-add exactly where torch has one. The compiler must not make others (-ffp-contract=off).
// Before the library is used, it is compared with torch on this machine (ADR 0007).
//
// Several threads may share the work. No result depends on where it is cut, so the bits do not depend on
// the number of threads.

#include <pthread.h>
#include <signal.h>
#ifdef __linux__
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace {

struct Options {  // one param group; fields in the order of _Options in fused_update.py
  double lr, beta1, beta2, weight_decay, eps;
  int64_t decoupled, maximize;
};

struct Span {  // one fragment of a parameter; fields in the order of _Span in fused_update.py
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
  uint16_t* low;  // the rounded parameter; null if the master is the parameter itself
  const float* step;
  int64_t grad_at;  // where its gradient starts in the chunk's gradient
  int64_t numel;
  int64_t group;
  int64_t chunk;  // the index of its chunk's gradient
};

inline float widen(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

inline float widen(float wide) { return wide; }

inline uint16_t narrow(float wide) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &wide, sizeof bits);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : static_cast<uint16_t>(rounded);
}

template <typename Grad, bool kHasLow, bool kDecoupled>
void update(const Span& span, const Grad* __restrict grad, int64_t begin, int64_t end, float factor,
            const Options& options) {
  const double step = *span.step;
  const double correction1 = 1 - std::pow(options.beta1, step);
  const double correction2 = 1 - std::pow(options.beta2, step);
  const float decay = static_cast<float>(1 - options.lr * options.weight_decay);
  const float l2 = static_cast<float>(options.weight_decay);
  // The first moment moves from its old value towards the gradient, computed from the nearer of the two.
  const bool near = static_cast<float>(1 - options.beta1) < 0.5f;
  const float weight1 = static_cast<float>(1 - options.beta1) - (near ? 0.0f : 1.0f);
  const float beta2 = static_cast<float>(options.beta2);
  const float weight2 = static_cast<float>(1 - options.beta2);
  const float step_size = static_cast<float>(-(options.lr / correction1));
  const float root2 = static_cast<float>(std::sqrt(correction2));
  const float eps = static_cast<float>(options.eps);
  const float sign = options.maximize ? -1.0f : 1.0f;
  const bool decays = options.weight_decay != 0;

  float* __restrict master = span.master;
  float* __restrict exp_avg = span.exp_avg;
  float* __restrict exp_avg_sq = span.exp_avg_sq;
  uint16_t* __restrict low = span.low;
  for (int64_t i = begin; i < end; ++i) {
    float param = master[i];
    if (kHasLow) {  // start from the parameter where the program wrote into it
      const float seen = widen(low[i]);
      param = widen(narrow(param)) != seen ? seen : param;
    }
    float g = widen(grad[i]) * factor * sign;
    if (kDecoupled) {
      param = decays ? param * decay : param;
    } else {
      g = decays ? __builtin_fmaf(param, l2, g) : g;
    }
    const float first = __builtin_fmaf(weight1, g - exp_avg[i], (near ? exp_avg[i] : g));
    const float second = __builtin_fmaf(weight2 * g, g, exp_avg_sq[i] * beta2);
    const float denominator = std::sqrt(second) / root2 + eps;
    param = param + step_size * first / denominator;
    master[i] = param;
    exp_avg[i] = first;
    exp_avg_sq[i] = second;
    if (kHasLow) low[i] = narrow(param);
  }
}

template <typename Grad>
void update_part(const Span& span, const Options& options, const Grad* const* grads, float factor, int64_t begin,
                 int64_t end) {
  const Grad* own = grads[span.chunk] + span.grad_at;
  if (span.low && options.decoupled) update<Grad, true, true>(span, own, begin, end, factor, options);
  else if (span.low) update<Grad, true, false>(span, own, begin, end, factor, options);
  else if (options.decoupled) update<Grad, false, true>(span, own, begin, end, factor, options);
  else update<Grad, false, false>(span, own, begin, end, factor, options);
}

class Work {
 public:
  virtual void run() noexcept = 0;  // called by every thread that takes part; returns when all is taken

 protected:
  ~Work() = default;
};

// All spans one after another, cut into equal pieces. A thread that is free takes the next piece.
template <typename Grad>
class Step final : public Work {
 public:
  Step(const Span* spans, int64_t count, const Options* groups, const Grad* const* grads, float factor,
       int64_t piece_numel)
      : spans_(spans), count_(count), groups_(groups), grads_(grads), factor_(factor), piece_numel_(piece_numel) {
    std::fegetenv(&environment_);
  }

  void run() noexcept override {
    std::fesetenv(&environment_);  // the caller's: it decides whether denormal numbers count as zero
    int64_t at = 0, start = 0;     // span `at` begins at element `start` of all
    for (;;) {
      const int64_t begin = next_.fetch_add(piece_numel_, std::memory_order_relaxed);
      const int64_t end = begin + piece_numel_;
      while (at < count_ && start + spans_[at].numel <= begin) start += spans_[at++].numel;
      if (at == count_) return;
      for (int64_t i = at, from = start; i < count_ && from < end; from += spans_[i++].numel) {
        const Span& span = spans_[i];
        update_part(span, groups_[span.group], grads_, factor_, std::max<int64_t>(begin - from, 0),
                    std::min(end - from, span.numel));
      }
    }
  }

 private:
  const Span* spans_;
  int64_t count_;
  const Options* groups_;
  const Grad* const* grads_;
  float factor_;
  int64_t piece_numel_;
  std::fenv_t environment_;
  alignas(64) std::atomic<int64_t> next_{0};  // the first element that no thread took
};

#ifdef __linux__

// Keeps a helper from waking on the caller's processor. Linux tends to wake a thread where it ran last, even
// if its waker is busy there and another processor is idle. Both then take turns until the next balancing,
// which takes longer than a step. So a helper that slept there may not run there until it has woken.
class Seat {
 public:
  Seat() { pthread_setname_np(pthread_self(), "zs-update"); }

  void leave() { slept_at_ = sched_getcpu(); }

  void avoid(int processor) {  // called by the caller while the helper sleeps
    if (slept_at_ != processor && !is_aside_) return;
    if (!is_aside_ && sched_getaffinity(thread_, sizeof allowed_, &allowed_) != 0) return;
    cpu_set_t others = allowed_;
    CPU_CLR(processor, &others);
    if (CPU_COUNT(&others) == 0) return;
    is_aside_ = sched_setaffinity(thread_, sizeof others, &others) == 0 || is_aside_;
  }

  void take() {
    if (is_aside_) sched_setaffinity(thread_, sizeof allowed_, &allowed_);
    is_aside_ = false;
  }

 private:
  pid_t thread_ = static_cast<pid_t>(syscall(SYS_gettid));
  int slept_at_ = sched_getcpu();
  bool is_aside_ = false;
  cpu_set_t allowed_;
};

int processor() { return sched_getcpu(); }

#else

struct Seat {
  void leave() {}
  void avoid(int) {}
  void take() {}
};

int processor() { return -1; }

#endif

// Threads that sleep until there is work; there is one work at a time. They are detached and the pool is
// never destroyed, so the process may end in any way while they sleep. No thread waits by spinning.
class Pool {
 public:
  // Call `work.run()` on this thread and on up to `helpers` others; return when all of these have returned.
  // A helper that wakes only after this thread has finished is not waited for.
  void run(Work& work, int64_t helpers) {
    const std::lock_guard<std::mutex> alone(calls_);
    {
      const std::lock_guard<std::mutex> lock(state_);
      while (alive_ < helpers && hire()) ++alive_;
      helpers = std::min(helpers, alive_);
      work_ = &work;
      seats_ = helpers;
      const int here = processor();
      for (Seat* seat : asleep_) seat->avoid(here);
    }
    for (int64_t seat = 0; seat < helpers; ++seat) wake_.notify_one();
    work.run();
    std::unique_lock<std::mutex> lock(state_);
    work_ = nullptr;
    seats_ = 0;
    done_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  static constexpr std::chrono::seconds kIdle{5};  // a helper then ends; starting it again costs 0.1 ms

  bool hire() noexcept {  // signals are blocked: the program's handlers run on its own threads
    sigset_t all, before;
    sigfillset(&all);
    for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&all, own);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    bool hired = true;
    try {
      std::thread(&Pool::serve, this).detach();
    } catch (const std::system_error&) {  // the process may have no more threads: use fewer
      hired = false;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return hired;
  }

  void serve() {
    Seat own;
    std::unique_lock<std::mutex> lock(state_);
    for (;;) {
      own.leave();
      asleep_.push_back(&own);
      const bool wanted = wake_.wait_for(lock, kIdle, [this] { return seats_ > 0; });
      asleep_.erase(std::find(asleep_.begin(), asleep_.end(), &own));
      own.take();
      if (!wanted) break;
      --seats_;
      ++busy_;
      Work& work = *work_;
      lock.unlock();
      work.run();
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
    --alive_;
  }

  std::mutex calls_;  // held by the caller whose work is running
  std::mutex state_;  // guards the fields below
  std::condition_variable wake_, done_;
  Work* work_ = nullptr;
  int64_t seats_ = 0, busy_ = 0, alive_ = 0;  // helpers wanted, working, existing
  std::vector<Seat*> asleep_;
};

std::atomic<Pool*> the_pool{nullptr};

// A forked child has no helpers, and locks in its copy of the pool may stay held: it drops the pool.
[[maybe_unused]] const int forgets_in_children = pthread_atfork(nullptr, nullptr, [] { the_pool = nullptr; });

Pool& pool() {
  Pool* found = the_pool;
  if (found == nullptr) {
    Pool* made = new Pool;
    if (the_pool.compare_exchange_strong(found, made)) return *made;
    delete made;
  }
  return *found;
}

// Torch compiles its norm for AVX2 and for no later instructions (there is no other copy of it in its library):
// eight sums at a time. Of what is left, four are squared by one instruction, and up to three are squared and
// added at once. The difference shows where a square is not exact: in norms of norms, and if it is denormal.
constexpr int kLanes = 8;
constexpr int kApart = 4;

template <typename Value>
float norm(const Value* values, int64_t numel) {
  float sums[kLanes] = {};
  const int64_t whole = numel - numel % kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const float value = widen(values[i + lane]);
      sums[lane] += value * value;
    }
  }
  for (int lane = 1; lane < kLanes; ++lane) sums[0] += sums[lane];
  int64_t i = whole;
  for (const int64_t end = whole + (numel - whole) / kApart * kApart; i < end; ++i) {
    sums[0] += widen(values[i]) * widen(values[i]);
  }
  for (; i < numel; ++i) sums[0] = __builtin_fmaf(widen(values[i]), widen(values[i]), sums[0]);
  return numel == 1 ? std::fabs(widen(values[0])) : std::sqrt(sums[0]);
}

struct Part {  // of a gradient
  const uint16_t* values;
  int64_t numel;
  float norm;
};

class Norms final : public Work {
 public:
  explicit Norms(std::vector<Part>& parts) : parts_(parts) { std::fegetenv(&environment_); }

  void run() noexcept override {
    std::fesetenv(&environment_);
    const int64_t count = static_cast<int64_t>(parts_.size());
    for (int64_t at; (at = next_.fetch_add(1, std::memory_order_relaxed)) < count;) {
      parts_[at].norm = norm(parts_[at].values, parts_[at].numel);
    }
  }

 private:
  std::vector<Part>& parts_;
  std::fenv_t environment_;
  alignas(64) std::atomic<int64_t> next_{0};  // the first part that no thread took
};

template <typename Grad>
void step(const Span* spans, int64_t count, const Options* groups, const Grad* const* grads, float factor,
          int64_t threads, int64_t piece_numel) {
  constexpr int64_t kAll = int64_t{1} << 62;
  Step<Grad> work(spans, count, groups, grads, factor, threads > 1 ? piece_numel : kAll);
  if (threads > 1) pool().run(work, threads - 1);
  else work.run();
}

}  // namespace

extern "C" {

// `grads`: the gradients of the chunks. `threads`: the caller and up to `threads - 1` helpers share pieces of `piece_numel` elements. Both numbers
// are positive. Calls from several threads are safe; those that use the pool run one after another.
void adam_bf16(const Span* spans, int64_t count, const Options* groups, const uint16_t* const* grads, float factor,
               int64_t threads, int64_t piece_numel) {
  step(spans, count, groups, grads, factor, threads, piece_numel);
}

void adam_fp32(const Span* spans, int64_t count, const Options* groups, const float* const* grads, float factor,
               int64_t threads, int64_t piece_numel) {
  step(spans, count, groups, grads, factor, threads, piece_numel);
}

// Norms of `count` fragments of gradients. Fragment `i` is a part of gradient `cuts[3 i]`, and begins and ends at
// its elements `cuts[3 i + 1]` and `cuts[3 i + 2]`. The norm of a fragment of more than `part_numel` elements is that of the norms of its parts.
void norms_bf16(const uint16_t* const* grads, const int64_t* cuts, int64_t count, float* norms, int64_t threads,
                int64_t part_numel) {
  std::vector<Part> parts;
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t at = cuts[3 * i + 1]; at < cuts[3 * i + 2]; at += part_numel) {
      parts.push_back({grads[cuts[3 * i]] + at, std::min(part_numel, cuts[3 * i + 2] - at), 0});
    }
  }
  Norms work(parts);
  if (threads > 1) pool().run(work, threads - 1);
  else work.run();
  std::vector<float> found;
  auto part = parts.begin();
  for (int64_t i = 0; i < count; ++i) {
    found.clear();
    for (int64_t at = cuts[3 * i + 1]; at < cuts[3 * i + 2]; at += part_numel) found.push_back((part++)->norm);
    norms[i] = found.size() == 1 ? found[0] : norm(found.data(), static_cast<int64_t>(found.size()));
  }
}
}
