#include "jinja_functions.h"

namespace edgekit::jinja {

std::vector<const Value*> Arguments::bound(const std::string& function,
                                           std::initializer_list<const char*> names) const {
  const auto refuse_these = [&] { unsupported("these arguments of " + quote_short(function)); };
  std::vector<const Value*> found(names.size(), nullptr);
  if (places.size() > names.size()) refuse_these();
  for (size_t place = 0; place < places.size(); ++place) found[place] = &places[place];
  for (const auto& [name, value] : named) {
    size_t place = 0;
    for (const char* each : names) {
      if (name == each) break;
      ++place;
    }
    if (place == names.size() || found[place] != nullptr) refuse_these();
    found[place] = &value;
  }
  return found;
}

std::string text_or(const Value* given, const char* otherwise) {
  if (given == nullptr) return otherwise;
  if (!given->is_text()) refuse(std::string("a text was expected, not '") + given->kind() + "'");
  return given->text();
}

int64_t whole_or(const Value* given, int64_t otherwise) {
  if (given == nullptr) return otherwise;
  if (!given->is_whole()) refuse(std::string("a whole number was expected, not '") + given->kind() + "'");
  return given->whole();
}

bool truth_or(const Value* given, bool otherwise) { return given == nullptr ? otherwise : given->truth(); }

}  // namespace edgekit::jinja
