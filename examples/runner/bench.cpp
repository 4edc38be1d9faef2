#include "bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <stdexcept>
#include <thread>

using edgekit::Json;

namespace {

std::vector<Times> run_case(Program& program, const Case& one, int64_t chunk) {
  std::vector<Times> found;
  std::vector<int64_t> said;
  for (const Request& request : one.requests) {
    std::vector<int64_t> prompt = request.continues ? said : std::vector<int64_t>();
    prompt.insert(prompt.end(), request.tokens.begin(), request.tokens.end());
    std::vector<int64_t> written;
    found.push_back(generate(program, prompt, request.depth, request.outputs, chunk, written));
    said = prompt;
    said.insert(said.end(), written.begin(), written.end());
  }
  return found;
}

std::optional<std::string> verdict(const Trial& trial, const Rules& rules) {
  const auto& [waited, others] = trial.found;
  if ((waited && *waited > rules.contended_share) || (others && *others > rules.contended_share)) return "contended";
  // Without counters nobody can tell a neighbour from heat: slow is slow.
  if (std::max(trial.canary_before, trial.canary_after) > rules.throttled) return waited ? "throttled" : "contended";
  return std::nullopt;
}

Trial make_trial(Program& program, Machine& machine, const Case& one, const Rules& rules, int repeat, int attempt) {
  Trial trial;
  trial.repeat = repeat;
  trial.attempt = attempt;
  trial.canary_before = machine.canary();
  const Usage before = machine.usage();
  trial.requests = run_case(program, one, rules.chunk);
  const Usage after = machine.usage();
  trial.canary_after = machine.canary();
  trial.total_s = after.at_s - before.at_s;
  trial.found = machine.between(before, after);
  trial.invalid = verdict(trial, rules);
  return trial;
}

// The value below which that share lies, between neighbours.
double percentile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  const double place = share * static_cast<double>(values.size() - 1);
  const auto low = static_cast<size_t>(std::floor(place));
  const size_t high = std::min(low + 1, values.size() - 1);
  return values[low] + (values[high] - values[low]) * (place - static_cast<double>(low));
}

using Read = std::function<std::optional<double>(const Trial&)>;

Read gap(double share) {
  return [share](const Trial& trial) -> std::optional<double> {
    std::vector<double> gaps;
    for (const Times& each : trial.requests) gaps.insert(gaps.end(), each.gaps_s.begin(), each.gaps_s.end());
    if (gaps.empty()) return std::nullopt;
    return percentile(gaps, share);
  };
}

std::optional<double> prefill(const Trial& trial) {
  double tokens = 0, seconds = 0;
  for (const Times& each : trial.requests) tokens += static_cast<double>(each.timed), seconds += each.prefill_s;
  return seconds > 0 ? std::optional(tokens / seconds) : std::nullopt;
}

std::optional<double> decode(const Trial& trial) {
  double tokens = 0, seconds = 0;
  for (const Times& each : trial.requests) {
    tokens += static_cast<double>(std::max<int64_t>(0, each.tokens - 1));
    seconds += each.decode_s;
  }
  return seconds > 0 && tokens > 0 ? std::optional(tokens / seconds) : std::nullopt;
}

std::optional<double> first_token(const Trial& trial) {
  std::vector<double> found;
  for (const Times& each : trial.requests) found.push_back(each.prefill_s);
  return percentile(found, 0.5);
}

int64_t likeliest(const float* logits, int64_t vocabulary) {
  return std::max_element(logits, logits + vocabulary) - logits;
}

}  // namespace

Times generate(Program& program, const std::vector<int64_t>& prompt, int64_t depth, int64_t outputs, int64_t chunk,
               std::vector<int64_t>& written) {
  const auto size = static_cast<int64_t>(prompt.size());
  if (size == 0 || outputs < 1 || depth >= size) throw std::runtime_error("a request without a prompt to time");
  int64_t held = 0, next = 0;
  const auto feed_until = [&](int64_t stop) {
    while (held < stop) {
      const int64_t count = std::min(chunk, stop - held);
      next = likeliest(program.feed(prompt.data() + held, count, held), program.vocabulary());
      held += count;
    }
  };
  feed_until(depth);
  const double began = now_s();
  feed_until(size);
  std::vector<double> at{now_s()};
  written.assign(1, next);
  while (static_cast<int64_t>(written.size()) < outputs) {
    const int64_t last = written.back();
    written.push_back(likeliest(program.feed(&last, 1, held++), program.vocabulary()));
    at.push_back(now_s());
  }
  Times times;
  times.prompt = size;
  times.timed = size - depth;
  times.tokens = outputs;
  times.prefill_s = at.front() - began;
  times.decode_s = at.back() - at.front();
  for (size_t i = 1; i < at.size(); ++i) times.gaps_s.push_back(at[i] - at[i - 1]);
  return times;
}

std::vector<std::vector<Trial>> run(Program& program, Machine& machine, const std::vector<Case>& cases,
                                    const Rules& rules) {
  std::vector<std::vector<Trial>> found(cases.size());
  for (int repeat = -rules.warmups; repeat < rules.repeats; ++repeat) {
    for (size_t index = 0; index < cases.size(); ++index) {
      if (cases[index].refused) continue;
      if (repeat < 0) {
        run_case(program, cases[index], rules.chunk);
        continue;
      }
      for (int attempt = 0; attempt < rules.attempts; ++attempt) {
        found[index].push_back(make_trial(program, machine, cases[index], rules, repeat, attempt));
        if (!found[index].back().invalid) break;
        if (attempt + 1 < rules.attempts) {
          std::this_thread::sleep_for(std::chrono::duration<double>(rules.cool_down_s * (attempt + 1)));
        }
      }
    }
  }
  return found;
}

Json Trial::json() const {
  Json::List made;
  for (const Times& each : requests) {
    made.push_back(Json::Members{
        {"prompt_tokens", each.prompt},
        {"timed_tokens", each.timed},
        {"tokens", each.tokens},
        {"prefill_s", each.prefill_s},
        {"first_token_s", each.prefill_s},
        {"decode_s", each.decode_s},
        {"gaps_s", Json::List(each.gaps_s.begin(), each.gaps_s.end())},
    });
  }
  return Json::Members{
      {"repeat", repeat},
      {"attempt", attempt},
      {"requests", made},
      {"total_s", total_s},
      {"canary_before", canary_before},
      {"canary_after", canary_after},
      {"waited_share", found.waited_share},
      {"others_share", found.others_share},
      {"invalid", invalid},
  };
}

Json summary_of(const std::vector<Trial>& trials) {
  static const std::vector<std::pair<const char*, Read>> kMetrics = {
      {"prefill_tokens_per_s", prefill}, {"decode_tokens_per_s", decode}, {"first_token_s", first_token},
      {"gap_p50_s", gap(0.5)},           {"gap_p90_s", gap(0.9)},         {"gap_p99_s", gap(0.99)},
      {"gap_max_s", gap(1.0)},           {"total_s", [](const Trial& trial) { return std::optional(trial.total_s); }},
  };
  Json::Members found;
  for (const auto& [name, read] : kMetrics) {
    std::vector<double> values;
    for (const Trial& trial : trials) {
      if (trial.invalid) continue;
      if (const auto value = read(trial)) values.push_back(*value);
    }
    if (values.empty()) continue;
    const double middle = percentile(values, 0.5);
    const auto [low, high] = std::minmax_element(values.begin(), values.end());
    found.emplace_back(name, Json::Members{{"median", middle},
                                           {"low", *low},
                                           {"high", *high},
                                           {"spread", middle > 0 ? (*high - *low) / middle : 0.0},
                                           {"count", static_cast<int64_t>(values.size())}});
  }
  return found;
}
