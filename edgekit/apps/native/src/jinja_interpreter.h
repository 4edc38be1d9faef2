// Renders a parsed template.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "jinja_syntax.h"

namespace edgekit::jinja {

// `variables` are what the template may read. Throws std::runtime_error, also past the budget or `most_bytes`.
std::string render(const Body& body, std::vector<std::pair<std::string, Value>> variables, size_t most_bytes,
                   Budget& budget);

}  // namespace edgekit::jinja
