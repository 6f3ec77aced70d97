// Adam and AdamW over the spans of one shard, in one pass over memory.
//
// The numbers are those of torch's fused CPU kernel, bit for bit: the same operations in the same order,
// and a fused multiply-add exactly where torch has one. The compiler must not make others
// (-ffp-contract=off). Before the library is used, it is compared with torch on the machine at hand.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct Options {  // one param group; the order is that of adam.py
  double lr, beta1, beta2, weight_decay, eps;
  int64_t decoupled, maximize;
};

struct Span {  // one fragment of a parameter
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
  uint16_t* low;  // the rounded parameter; null where the master is the parameter
  const float* step;
  int64_t grad_at;  // elements from the beginning of the shard's gradient
  int64_t numel;
  int64_t group;
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
  const float weight1 = static_cast<float>(1 - options.beta1);
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
    if (kHasLow) {  // what the program wrote into the parameter is what the step starts from
      const float seen = widen(low[i]);
      param = widen(narrow(param)) != seen ? seen : param;
    }
    float g = widen(grad[i]) * factor * sign;
    if (kDecoupled) {
      param = decays ? param * decay : param;
    } else {
      g = decays ? __builtin_fmaf(param, l2, g) : g;
    }
    const float first = __builtin_fmaf(weight1, g - exp_avg[i], exp_avg[i]);
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
void update_all(const Span* spans, int64_t count, const Options* groups, const Grad* grad, float factor,
                int64_t part, int64_t parts) {
  for (int64_t at = 0; at < count; ++at) {
    const Span& span = spans[at];
    const Options& options = groups[span.group];
    const int64_t begin = span.numel / 64 * part / parts * 64;  // numel is a multiple of 64
    const int64_t end = span.numel / 64 * (part + 1) / parts * 64;
    const Grad* own = grad + span.grad_at;
    if (span.low && options.decoupled) update<Grad, true, true>(span, own, begin, end, factor, options);
    else if (span.low) update<Grad, true, false>(span, own, begin, end, factor, options);
    else if (options.decoupled) update<Grad, false, true>(span, own, begin, end, factor, options);
    else update<Grad, false, false>(span, own, begin, end, factor, options);
  }
}

}  // namespace

extern "C" {

// Part `part` of `parts` of every span, so that several threads share the work.
void adam_bf16(const Span* spans, int64_t count, const Options* groups, const uint16_t* grad, float factor,
               int64_t part, int64_t parts) {
  update_all(spans, count, groups, grad, factor, part, parts);
}

void adam_fp32(const Span* spans, int64_t count, const Options* groups, const float* grad, float factor,
               int64_t part, int64_t parts) {
  update_all(spans, count, groups, grad, factor, part, parts);
}
}
