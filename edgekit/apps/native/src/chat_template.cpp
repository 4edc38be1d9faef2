#include "chat_template.h"

#include <algorithm>

#include "chat_messages.h"
#include "errors.h"
#include "jinja_interpreter.h"
#include "utf8.h"

namespace edgekit {
namespace {

constexpr const char* kSpecial[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                    "pad_token", "cls_token", "mask_token"};
constexpr const char* kOwn[] = {"messages", "tools", "documents", "add_generation_prompt"};
constexpr size_t kMostChatBytes = 8u << 20, kMoreBytes = 1u << 20;
constexpr size_t kUnits = 2u << 20, kUnitsPerByte = 8;  // of the budget of a rendering

std::optional<std::string> token_text(const Json* token) {
  if (token != nullptr && token->is_object()) token = token->find("content");
  if (token == nullptr || !token->is_text()) return std::nullopt;
  return token->text("token");
}

void check_option(const std::string& name) {
  const auto is_name = [&](const char* each) { return name == each; };
  const auto is_letter = [](char each) {
    return each == '_' || (each >= 'a' && each <= 'z') || (each >= 'A' && each <= 'Z') || (each >= '0' && each <= '9');
  };
  const bool is_free = !name.empty() && (name[0] < '0' || name[0] > '9') &&
                       std::all_of(name.begin(), name.end(), is_letter) &&
                       std::none_of(std::begin(kSpecial), std::end(kSpecial), is_name) &&
                       std::none_of(std::begin(kOwn), std::end(kOwn), is_name);
  if (!is_free) refuse("options: " + quote_short(name) + " cannot be set; choose a name that the template reads");
}

Json parsed(const char* what, const std::string& text) {
  try {
    return Json::parse(text);
  } catch (const std::runtime_error& error) {
    refuse(std::string(what) + ": " + error.what());
  }
}

}  // namespace

ChatTemplate::ChatTemplate(const std::optional<std::string>& config, const std::optional<std::string>& source) {
  if (config) {
    const Json read = Json::parse(*config, Json::LargeNumbers::kRounded);
    for (const char* name : kSpecial) {
      if (const auto text = token_text(read.find(name))) special_tokens_.emplace_back(name, *text);
    }
    const Json* found = read.find("chat_template");
    if (found != nullptr && found->is_text()) add("default", found->text("chat_template"));
    if (found != nullptr && found->is_list()) {
      for (const Json& each : found->list("chat_template")) {
        const auto has = [&](const char* name) { return each.find(name) != nullptr && each.find(name)->is_text(); };
        if (each.is_object() && has("name") && has("template")) add(each.at("name").text("name"), each.at("template").text("template"));
      }
    }
  }
  if (source) add("default", *source);
}

void ChatTemplate::add(const std::string& name, const std::string& source) {
  Source made{source.find("tools") != std::string::npos, {}, ""};
  try {
    if (source.size() > kMostTemplateBytes) refuse("it has more than " + std::to_string(kMostTemplateBytes) + " bytes");
    if (first_invalid(source) < source.size()) refuse("it is not UTF-8");
    made.body = jinja::parse(source);
  } catch (const std::runtime_error& error) {
    made.error = error.what();
  }
  sources_.insert_or_assign(name, std::move(made));
}

const ChatTemplate::Source& ChatTemplate::chosen(bool has_tools) const {
  auto found = has_tools ? sources_.find("tool_use") : sources_.end();
  if (found == sources_.end()) found = sources_.find("default");
  if (found == sources_.end()) {
    refuse(sources_.empty() ? "the model has no chat template; give a plain prompt"
                            : "the model has several chat templates and none is the default");
  }
  return found->second;
}

std::string ChatTemplate::render(const Chat& chat) const {
  const size_t given = chat.messages.size() + chat.tools.value_or("").size() + chat.options.value_or("").size();
  if (given > kMostChatBytes) {
    refuse("the chat has " + std::to_string(given) + " bytes; at most " + std::to_string(kMostChatBytes) +
           " are rendered");
  }
  const Source& source = chosen(chat.tools.has_value());
  jinja::Budget budget(kUnits + kUnitsPerByte * given);
  ChatMessages messages = checked_messages(parsed("messages", chat.messages), budget);
  jinja::Value tools = jinja::Value::none();
  if (chat.tools) tools = checked_tools(parsed("tools", *chat.tools), budget);
  if (tools.truth() && !source.takes_tools) {
    messages = with_described_tools(messages, tools, budget);
    tools = jinja::Value::none();
  }
  std::vector<std::pair<std::string, jinja::Value>> variables;
  for (const auto& [name, text] : special_tokens_) variables.emplace_back(name, jinja::Value(text));
  if (chat.options) {
    const Json options = parsed("options", *chat.options);
    for (const auto& [name, value] : options.members("options")) {
      check_option(name);
      variables.emplace_back(name, jinja::from_json(value, budget));
    }
  }
  variables.emplace_back("messages", as_list(std::move(messages), budget));
  variables.emplace_back("tools", std::move(tools));
  variables.emplace_back("documents", jinja::Value::none());
  variables.emplace_back("add_generation_prompt", jinja::Value(chat.adds_generation_prompt));
  try {
    if (!source.error.empty()) refuse(source.error);
    return jinja::render(source.body, std::move(variables), kMoreBytes + 4 * given, budget);
  } catch (const std::runtime_error& error) {
    refuse("the chat template refused: " + one_line(error.what()));
  }
}

}  // namespace edgekit
