// The strings between chat messages: what `edgekit inspect ARTIFACT --chat-format` prints.
package com.example.edgekit

import org.json.JSONObject

class ChatFormat(json: String) {
  private val strings = JSONObject(json)
  private val stripped = list("strips")
  private val ends = list("ends")

  /** What to feed for the first question. */
  fun begin(system: String?, question: String): String {
    if (system == null) return strings.getString("first") + user(question)
    require(!strings.isNull("system")) { "this model takes no system message" }
    val around = strings.getJSONArray("system")
    return around.getString(0) + clean("system", system) + around.getString(1) + user(question)
  }

  /** What to feed for a further question, after the answer that the model wrote. */
  fun next(question: String): String = strings.getString("assistant_to_user") + user(question)

  /** Whether [piece] is an end of the answer, which the runner writes as if it belonged to it. */
  fun isEnd(piece: String) = piece in ends

  private fun list(name: String) = strings.getJSONArray(name).let { all -> (0 until all.length()).map { all.getString(it) } }

  private fun user(question: String) = clean("user", question) + strings.getString("last")

  private fun clean(role: String, content: String) = if (role in stripped) content.trim() else content
}
