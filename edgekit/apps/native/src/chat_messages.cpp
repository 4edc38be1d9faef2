#include "chat_messages.h"

#include <algorithm>

#include "errors.h"
#include "jinja_text.h"

namespace edgekit {
namespace {

using jinja::Budget;
using jinja::Value;
using Message = ChatMessages::value_type;

constexpr size_t kMostMessages = 10'000;
constexpr const char* kReasoning[] = {"reasoning_content", "thinking", "reasoning"};
constexpr const char* kBeforeTools =
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function "
    "signatures within <tools></tools> XML tags:\n<tools>\n";
constexpr const char* kAfterTools =
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": "
    "<args-json-object>}\n</tool_call>";

const Value* field(const Message& message, const char* name, Budget& budget) { return find(message, name, budget); }

bool is_role(const Message& message, const char* role, Budget& budget) {
  return field(message, "role", budget)->text() == role;
}

// Reasoning stands first under `thinking`, and also as `reasoning_content`.
void name_reasoning(Message& message, Budget& budget) {
  for (const char* name : kReasoning) {
    const Value* found = field(message, name, budget);
    if (found == nullptr) continue;
    const Value reasoning = *found;
    const auto is_thinking = [](const auto& each) { return each.first == "thinking"; };
    const auto place = std::find_if(message.begin(), message.end(), is_thinking);
    if (place == message.end()) message.insert(message.begin(), {"thinking", reasoning});
    else std::rotate(message.begin(), place, place + 1);
    set(message, "reasoning_content", reasoning, budget);
    return;
  }
}

Message checked_message(const Json& given, const std::string& place, Budget& budget) {
  const Json* role = given.is_object() ? given.find("role") : nullptr;
  if (role == nullptr || !role->is_text()) refuse(place + " must be an object with a role");
  Message message;
  for (const auto& [name, value] : given.members("message")) {
    if (!value.is_null()) message.emplace_back(name, jinja::from_json(value, budget));
  }
  const std::string& who = role->text("role");
  if (field(message, "content", budget) == nullptr && (who == "system" || who == "user"))
    refuse(place + ": a message of role " + who + " needs content");
  name_reasoning(message, budget);
  return message;
}

std::string json_of(const Value& value, Budget& budget) { return jinja::to_json(value, {}, budget); }

std::string call_text(const Value& call, Budget& budget) {
  const jinja::Dict* function = call.dict();
  if (const Value* inner = function == nullptr ? nullptr : find(function->entries, "function", budget)) {
    function = inner->dict();
    if (function == nullptr) refuse("messages: the function of a tool call is no object");
  }
  const Value *name = nullptr, *arguments = nullptr;
  if (function != nullptr) {
    name = find(function->entries, "name", budget);
    arguments = find(function->entries, "arguments", budget);
  }
  return "<tool_call>\n{\"name\": " + (name == nullptr ? "null" : json_of(*name, budget)) +
         ", \"arguments\": " + (arguments == nullptr ? "{}" : json_of(*arguments, budget)) + "}\n</tool_call>";
}

std::string calls_text(const Value& calls, Budget& budget) {
  if (calls.sequence() == nullptr) refuse("messages: tool_calls is no list");
  std::string made;
  for (const Value& each : calls.sequence()->items) made += (made.empty() ? "" : "\n") + call_text(each, budget);
  return made;
}

std::string result_text(const Message& message, Budget& budget) {
  const Value* content = field(message, "content", budget);
  const bool is_given = content != nullptr && content->truth();
  return "<tool_response>\n" + (is_given ? jinja::str(*content, budget) : "") + "\n</tool_response>";
}

// A message with a call of tools, as text.
Message with_calls_as_text(const Message& message, Budget& budget) {
  const Value* content = field(message, "content", budget);
  std::string text = content != nullptr && content->truth() ? jinja::str(*content, budget) + "\n" : "";
  Message kept;
  for (const auto& each : message) {
    if (each.first == "tool_calls") text += calls_text(each.second, budget);
    else kept.push_back(each);
  }
  set(kept, "content", Value(std::move(text)), budget);
  return kept;
}

}  // namespace

ChatMessages checked_messages(const Json& messages, Budget& budget) {
  if (!messages.is_list() || messages.list("messages").empty())
    refuse("messages must be a list with at least one {\"role\": ..., \"content\": ...}");
  const Json::List& listed = messages.list("messages");
  if (listed.size() > kMostMessages)
    refuse(std::to_string(listed.size()) + " messages; at most 10,000 are rendered");
  ChatMessages found;
  for (const Json& each : listed)
    found.push_back(checked_message(each, "messages[" + std::to_string(found.size()) + "]", budget));
  return found;
}

Value checked_tools(const Json& tools, Budget& budget) {
  for (const Json& each : tools.list("tools")) {
    if (!each.is_object()) refuse("tools must be a list of JSON objects that describe functions");
  }
  return jinja::from_json(tools, budget);
}

ChatMessages with_described_tools(const ChatMessages& messages, const Value& tools, Budget& budget) {
  std::string description = kBeforeTools;
  for (const Value& each : tools.sequence()->items)
    description += (&each == tools.sequence()->items.data() ? "" : "\n") + json_of(each, budget);
  description += kAfterTools;

  ChatMessages described{messages[0]};
  const Value* content = field(messages[0], "content", budget);
  const bool has_system = is_role(messages[0], "system", budget) && content != nullptr && content->is_text();
  if (has_system) set(described[0], "content", Value(content->text() + "\n\n" + description), budget);
  else described[0] = {{"role", Value(std::string("system"))}, {"content", Value(std::move(description))}};
  for (size_t place = has_system ? 1 : 0; place < messages.size(); ++place) {
    const Message& message = messages[place];
    const Value* calls = field(message, "tool_calls", budget);
    if (is_role(message, "tool", budget)) {
      const std::string text = result_text(message, budget);
      Message& before = described.back();
      const bool continues = is_role(before, "tool", budget);
      if (continues) set(before, "content", Value(field(before, "content", budget)->text() + "\n" + text), budget);
      else described.push_back({{"role", Value(std::string("tool"))}, {"content", Value(text)}});
    } else if (calls != nullptr && calls->truth()) {
      described.push_back(with_calls_as_text(message, budget));
    } else {
      described.push_back(message);
    }
  }
  for (Message& each : described) {  // such templates often refuse the role `tool`
    if (is_role(each, "tool", budget)) set(each, "role", Value(std::string("user")), budget);
  }
  return described;
}

Value as_list(ChatMessages messages, Budget& budget) {
  jinja::Values items;
  for (Message& each : messages) items.push_back(jinja::make_dict(std::move(each), budget));
  return jinja::make_sequence(jinja::Sequence::kList, std::move(items), budget);
}

}  // namespace edgekit
