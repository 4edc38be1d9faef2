// Filters on the tokens that may be chosen: the likeliest, by count or by probability, or the most typical.
//
// Scores are compared directly, which is exact; values that depend on the temperature are computed in float64 from the
// distances to the largest score.
#pragma once

#include <vector>

#include "noise.h"

namespace edgekit {

// Each keeps the order of the candidates. `high` is the largest score of all tokens.
void keep_best(std::vector<Candidate>& candidates, size_t count);
void keep_top_p(std::vector<Candidate>& candidates, double mass, double temperature, float high);
void keep_min_p(std::vector<Candidate>& candidates, double share, double temperature, float high);
void keep_typical(std::vector<Candidate>& candidates, double mass, double temperature, float high);

}  // namespace edgekit
