// Cases run again and again, each trial with what disturbed it; and what the trials come to.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "json.h"
#include "machine.h"
#include "program.h"

using edgekit::Program;

struct Request {
  std::vector<int64_t> tokens;  // that are new; what it goes on from is not among them
  int64_t depth = 0;            // tokens that are fed before prefill is timed
  int64_t outputs = 0;
  bool continues = false;
};

struct Case {
  std::string name;
  std::optional<std::string> refused;
  std::vector<Request> requests;
};

// How trials are made and judged.
struct Rules {
  int warmups = 0, repeats = 0, attempts = 0;
  int64_t chunk = 1;  // tokens of one call
  double cool_down_s = 0, contended_share = 0, throttled = 0;
};

struct Times {
  int64_t prompt = 0, timed = 0, tokens = 0;
  double prefill_s = 0, decode_s = 0;
  std::vector<double> gaps_s;
};

struct Trial {
  int repeat = 0, attempt = 0;
  std::vector<Times> requests;
  double total_s = 0, canary_before = 1, canary_after = 1;
  Disturbance found;
  std::optional<std::string> invalid;

  edgekit::Json json() const;
};

// Every case in turn, so many times; trials of case i at i.
std::vector<std::vector<Trial>> run(Program& program, Machine& machine, const std::vector<Case>& cases,
                                    const Rules& rules);

// Greedy, past the end of the text; `depth` tokens are fed before the clock of prefill starts.
Times generate(Program& program, const std::vector<int64_t>& prompt, int64_t depth, int64_t outputs, int64_t chunk,
               std::vector<int64_t>& written);

// Median, low, high, spread and count of each metric over the trials that nothing disturbed.
edgekit::Json summary_of(const std::vector<Trial>& trials);
