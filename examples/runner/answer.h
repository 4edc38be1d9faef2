// From a question, as JSON, to a Measurement, as JSON: checks that what is measured is what was asked for.
#pragma once

#include <string>

struct Answer {
  std::string line;  // one Measurement
  bool is_valid;     // at least one undisturbed number of every case
};

// `folder` holds manifest.json and the program; with `meminfo`, what `dumpsys meminfo` says is written there.
// Throws std::runtime_error where the question cannot be answered at all.
Answer answer(const std::string& folder, const std::string& question, const std::string& meminfo);
