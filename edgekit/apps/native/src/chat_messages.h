// Messages and tools of a chat, checked and changed as Python does before a template sees them.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "jinja_value.h"

namespace edgekit {

using ChatMessages = std::vector<std::vector<std::pair<std::string, jinja::Value>>>;

// Without null fields, and with reasoning under each of its names. Throws std::runtime_error.
ChatMessages checked_messages(const Json& messages, jinja::Budget& budget);

jinja::Value checked_tools(const Json& tools, jinja::Budget& budget);

// Messages in which tools, their calls and their results are text, for templates that take none.
ChatMessages with_described_tools(const ChatMessages& messages, const jinja::Value& tools, jinja::Budget& budget);

jinja::Value as_list(ChatMessages messages, jinja::Budget& budget);

}  // namespace edgekit
