// The model's own chat template: makes a prompt of messages, as Python's ChatTemplate does.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "jinja_syntax.h"
#include "json.h"

namespace edgekit {

constexpr size_t kMostTemplateBytes = 1u << 20, kMostTemplateConfigBytes = 32u << 20;

struct Chat {
  std::string messages;                  // JSON: a list of objects with a role
  std::optional<std::string> tools;      // JSON: a list of descriptions of functions
  std::optional<std::string> options;    // JSON: an object of further values that the template reads
  bool adds_generation_prompt = true;
};

class ChatTemplate {
 public:
  // `config` is tokenizer_config.json, `source` chat_template.jinja, which comes first. Throws std::runtime_error.
  ChatTemplate(const std::optional<std::string>& config, const std::optional<std::string>& source);

  // Throws std::runtime_error, also where there is no template.
  std::string render(const Chat& chat) const;

 private:
  struct Source {
    bool takes_tools;
    jinja::Body body;
    std::string error;  // why it cannot be used; empty: it can
  };
  void add(const std::string& name, const std::string& source);
  const Source& chosen(bool has_tools) const;

  std::map<std::string, Source> sources_;
  std::vector<std::pair<std::string, std::string>> special_tokens_;  // by the names that templates use
};

}  // namespace edgekit
