// The functions of attention, written once and compiled for each kind of processor: attention.cpp includes this file
// with another `TARGET`, `Vector` and its operations each time.

// Sums of R rows of `a` times two vectors of columns of `b`, each in the order of the `depth` terms.
template <int R>
TARGET void tile(const float* a, size_t a_stride, const float* b, size_t b_stride, size_t depth, float* out,
                 size_t out_stride) {
  Vector sum[R][2];
  for (int m = 0; m < R; m++) sum[m][0] = sum[m][1] = all(0.f);
  for (size_t k = 0; k < depth; k++, b += b_stride) {
    const Vector left = load(b), right = load(b + kLanes);
#pragma GCC unroll 12
    for (int m = 0; m < R; m++) {
      const Vector each = all(a[m * a_stride + k]);
      sum[m][0] = add_product(sum[m][0], each, left);
      sum[m][1] = add_product(sum[m][1], each, right);
    }
  }
  for (int m = 0; m < R; m++) {
    store(out + m * out_stride, sum[m][0]);
    store(out + m * out_stride + kLanes, sum[m][1]);
  }
}

using Tile = void (*)(const float*, size_t, const float*, size_t, size_t, float*, size_t);
template <int... R>
constexpr std::array<Tile, sizeof...(R)> tiles_of(std::integer_sequence<int, R...>) {
  return {tile<R + 1>...};
}
constexpr auto kTiles = tiles_of(std::make_integer_sequence<int, kMostRows>());

// e^x for x up to 0: exactly 1 at 0, and 0 far below; NaN stays. Plain code, which becomes the path's instructions.
TARGET INLINE float exponential(float x) {
  const float bounded = x < kLeastExponent ? kLeastExponent : x;
  const float rounded = __builtin_fmaf(bounded, 1.44269504f, kRounding);
  const float whole = rounded - kRounding;
  const float rest = __builtin_fmaf(whole, 1.42860677e-6f, __builtin_fmaf(whole, -0.693148613f, bounded));  // ln 2
  float sum = 1.f / 720;
  sum = __builtin_fmaf(sum, rest, 1.f / 120);
  sum = __builtin_fmaf(sum, rest, 1.f / 24);
  sum = __builtin_fmaf(sum, rest, 1.f / 6);
  sum = __builtin_fmaf(sum, rest, 1.f / 2);
  sum = __builtin_fmaf(sum, rest, 1.f);
  sum = __builtin_fmaf(sum, rest, 1.f);
  const uint32_t power = (bits_of(rounded) - bits_of(kRounding) + 127) << 23;
  float scale;
  std::memcpy(&scale, &power, sizeof scale);
  return x < kLeastExponent ? 0.f : sum * scale;
}

// Finds the largest of the scores `from` to `to` of a block. Those outside `first` to `end` are of keys not seen.
TARGET float largest_score(float* scores, size_t from, size_t to, size_t first, size_t end, float cap) {
  if (cap > 0)
    for (size_t at = from; at < to; at++) {
      const float power = exponential(std::fabs(scores[at]) * (-2 / cap));  // tanh x = (1 - e^-2x) / (1 + e^-2x)
      scores[at] = std::copysign(cap * ((1 - power) / (1 + power)), scores[at]);
    }
  const float unseen = -std::numeric_limits<float>::infinity();
  std::fill(scores + from, scores + std::min(std::max(first, from), to), unseen);
  std::fill(scores + std::max(std::min(end, to), from), scores + to, unseen);
  Vector largest = all(kLowest);
  for (size_t at = from; at < to; at += kLanes) largest = larger(load(scores + at), largest);
  return largest_lane(largest);
}

// Turns scores into weights relative to the largest one; returns their sum.
TARGET float weigh(float* scores, size_t from, size_t to, float most) {
  float sums[kTogether] = {};
  for (size_t at = from; at < to; at += kTogether)
    for (size_t i = 0; i < kTogether; i++) {
      const float weight = exponential(scores[at + i] - most);
      scores[at + i] = weight;
      sums[i] += weight;
    }
  for (size_t half = kTogether / 2; half >= kLanes; half /= 2)
    for (size_t i = 0; i < half; i++) sums[i] += sums[i + half];
  return sum_of_lanes(load(sums));
}

// Writes `kPanel` keys as [size, kPanel]; those beyond `count` repeat the last one, and nobody sees them. Meanwhile the
// next keys and these keys' values are called from memory.
template <typename Element>
TARGET void turn(const Element* keys, const Element* values, const float* steps, size_t size, size_t count, float* to) {
  const Element* rows[kPanel];
  for (size_t i = 0; i < kPanel; i++) rows[i] = keys + std::min(i, count - 1) * size;
  const auto* next = reinterpret_cast<const char*>(keys + std::min(kPanel, count) * size);
  const auto* beside = reinterpret_cast<const char*>(values);
  for (size_t at = 0; at < size; at += 4)
    for (size_t i = 0; i < kPanel; i += kLanes) {
      turn_four(rows + i, steps ? steps + at : nullptr, at, to + at * kPanel + i, kPanel);
      for (size_t line = 0; line < 4 * kLanes * sizeof(Element); line += kLine) {
        __builtin_prefetch(next + line);
        __builtin_prefetch(beside + line);
      }
      next += 4 * kLanes * sizeof(Element), beside += 4 * kLanes * sizeof(Element);
    }
}

// Writes values [count, size] as floats [count, padded_size].
template <typename Element>
TARGET void widen(const Element* values, const float* steps, size_t size, size_t count, float* to) {
  for (size_t row = 0; row < count; row++, values += size, to += padded_size(size)) {
    for (size_t at = 0; at < size; at += 4) store_four(values + at, steps ? steps + at : nullptr, to + at);
    std::fill(to + size, to + padded_size(size), 0.f);
  }
}

template <typename Element>
TARGET void block_of(const Head& head, const Queries& queries, size_t block, float* work, const Sums& to) {
  const size_t size = head.size, wide = padded_size(size), first = block * kBlockKeys;
  const auto within = [&](size_t key) { return key <= first ? 0 : std::min(key - first, kBlockKeys); };
  const size_t start = within(queries.first_key(0, head.window)) / kPanel * kPanel;
  const size_t end = within(queries.end_key(queries.count - 1));
  float *panel = work, *scores = panel + size * kColumns, *widened = scores + queries.count * kBlockKeys;
  const auto* keys = static_cast<const Element*>(head.keys) + first * size;
  const auto* values = static_cast<const Element*>(head.values) + first * size;
  // Queries in groups of nearly equal size, no larger than the registers of a path allow, with the end of their keys.
  const auto each_group = [&](const auto& body) {
    size_t row = 0;
    for (size_t left = (queries.count + kMostRows - 1) / kMostRows; left; left--) {
      const size_t rows = (queries.count - row + left - 1) / left;
      body(row, rows, within(queries.end_key(row + rows - 1)));
      row += rows;
    }
  };
  for (size_t at = start; at < end; at += kPanel) {
    turn(keys + at * size, values + at * size, head.key_steps, size, end - at, panel);
    each_group([&](size_t row, size_t rows, size_t ends) {
      float* to_scores = scores + row * kBlockKeys + at;
      if (at < ends) kTiles[rows - 1](queries.values + row * size, size, panel, kPanel, size, to_scores, kBlockKeys);
    });
  }
  const float* read = widened;
  if constexpr (std::is_same_v<Element, float>) read = values + start * size;
  if (size != wide || !std::is_same_v<Element, float>) {
    widen(values + start * size, head.value_steps, size, end - start, widened);
    read = widened;
  }
  each_group([&](size_t row, size_t rows, size_t ends) {
    const size_t stop = std::max(start, (ends + kPanel - 1) / kPanel * kPanel), depth = std::max(start, ends) - start;
    for (size_t i = row; i < row + rows; i++)
      to.most[i] = largest_score(scores + i * kBlockKeys, start, stop, within(queries.first_key(i, head.window)),
                                 within(queries.end_key(i)), head.cap);
    for (size_t i = row; i < row + rows; i++)
      to.total[i] = weigh(scores + i * kBlockKeys, start, stop, to.most[i]);
    const float* weights = scores + row * kBlockKeys + start;
    for (size_t at = 0; at < wide; at += kPanel)
      kTiles[rows - 1](weights, kBlockKeys, read + at, wide, depth, to.values + row * wide + at, wide);
  });
}

TARGET void block(const Head& head, const Queries& queries, size_t block, float* work, const Sums& to) {
  if (head.stored == Stored::kFloats) block_of<float>(head, queries, block, work, to);
  if (head.stored == Stored::kHalves) block_of<uint16_t>(head, queries, block, work, to);
  if (head.stored == Stored::kBytes) block_of<int8_t>(head, queries, block, work, to);
}

TARGET void begin(const Sums& sums, size_t count, size_t size) {
  std::fill(sums.most, sums.most + count, kLowest);
  std::fill(sums.total, sums.total + count, 0.f);
  std::fill(sums.values, sums.values + count * padded_size(size), 0.f);
}

TARGET void join(const Sums& sums, const Sums& next, size_t count, size_t size) {
  const size_t wide = padded_size(size);
  for (size_t first = 0; first < count; first += kTogether) {
    const size_t rows = std::min(kTogether, count - first);
    float kept[kTogether], added[kTogether];
    for (size_t i = 0; i < rows; i++) {
      const size_t row = first + i;
      const float most = std::max(sums.most[row], next.most[row]);
      kept[i] = exponential(sums.most[row] - most), added[i] = exponential(next.most[row] - most);
      sums.most[row] = most;
      sums.total[row] = __builtin_fmaf(next.total[row], added[i], sums.total[row] * kept[i]);
    }
    for (size_t i = 0; i < rows; i++) {
      float* to = sums.values + (first + i) * wide;
      const float* from = next.values + (first + i) * wide;
      for (size_t at = 0; at < wide; at += kLanes)
        store(to + at, add_product(scaled(load(to + at), all(kept[i])), load(from + at), all(added[i])));
    }
  }
}

TARGET void finish(const Sums& sums, const float* sinks, const Queries& queries, size_t size, float* out,
                   size_t stride) {
  const size_t wide = padded_size(size);
  for (size_t row = 0; row < queries.count; row++) {
    const size_t token = (queries.first + row) / queries.group - queries.first / queries.group;
    const size_t head = (queries.first + row) % queries.group;
    float total = sums.total[row], kept = 1;
    if (sinks) {
      const float most = std::max(sums.most[row], sinks[head]);
      kept = exponential(sums.most[row] - most);
      total = __builtin_fmaf(total, kept, exponential(sinks[head] - most));
    }
    const float share = kept / total;
    float* to = out + token * stride + head * size;
    for (size_t i = 0; i < size; i++) to[i] = sums.values[row * wide + i] * share + 0.f;  // no zero keeps its sign
  }
}

TARGET void rotate(const float* from, size_t size, const float* cosines, const float* sines, size_t pairs,
                   bool interleaved, float factor, float* to) {
  if (interleaved)
    for (size_t i = 0; i < pairs; i++) {
      const float a = from[2 * i], b = from[2 * i + 1];
      to[2 * i] = (a * cosines[i] - b * sines[i]) * factor;
      to[2 * i + 1] = (b * cosines[i] + a * sines[i]) * factor;
    }
  else
    for (size_t i = 0; i < pairs; i++) {
      const float a = from[i], b = from[pairs + i];
      to[i] = (a * cosines[i] - b * sines[i]) * factor;
      to[pairs + i] = (b * cosines[i] + a * sines[i]) * factor;
    }
  for (size_t i = 2 * pairs; i < size; i++) to[i] = from[i] * factor;
}

TARGET void keep(Stored stored, const float* from, const float* steps, size_t count, void* to) {
  if (stored == Stored::kFloats) std::copy(from, from + count, static_cast<float*>(to));
  if (stored == Stored::kHalves)
    for (size_t i = 0; i < count; i += 4) halve_four(from + i, static_cast<uint16_t*>(to) + i);
  if (stored == Stored::kBytes)
    for (size_t i = 0; i < count; i++) {
      const float whole = std::min(127.f, std::max(-128.f, from[i] / steps[i]));
      static_cast<int8_t*>(to)[i] = static_cast<int8_t>(bits_of(whole + kRounding) - bits_of(kRounding));
    }
}

constexpr AttentionPath kPath = {block, begin, join, finish, rotate, keep};
