// Notes in a file what the app is about to do, so that the next start can tell if it died. The file and the rules are
// those of `guard=` in Python's `edgekit.open`.
package com.example.edgekit

import java.io.File
import java.io.FileOutputStream
import java.io.IOException

private const val FAILURES_ALLOWED = 1 // a user who kills the app looks like a crash
private const val SAFE_TOKENS = 8 // tokens to generate before a start counts as successful
private const val MOST_BYTES = 64L shl 10

/**
 * [artifact] is the sha256 of the newest artifact's manifest; a new one starts anew. [settings] says what can be
 * opened, the largest first: the artifact, the same model with a shorter context, the former version. Open the one of
 * number [step]. After two starts in a row that died, each further start takes the next; show [note] then.
 *
 * Use it from one thread.
 */
class CrashGuard(private val file: File, private val artifact: String, private val settings: List<String>) {
  /** The last start, as it stands in the file: the note has JSON's escapes. */
  private data class Record(val step: Int, val state: String, val failures: Int, val note: String)

  private var record = decided(read())
  private var tokens = 0

  /** The setting to open, a number in the list. */
  val step: Int
    get() = record.step

  /** Why a smaller setting is opened; empty where it is not. */
  val note: String
    get() = record.note.replace(Regex("""\\(["\\])"""), "$1")

  /** Call it before the model is opened. */
  fun begin() = write(record.copy(state = "opening"))

  /** Call it when the model is open. An app that dies while nothing runs did not fail. */
  fun opened() = write(record.copy(state = "open"))

  /** Call it before a question is computed. */
  fun beforeTokens() {
    if (record.state == "open") write(record.copy(state = "first tokens"))
  }

  /** Call it with the number of tokens that were generated. */
  fun afterTokens(count: Int) {
    tokens += count
    if (tokens >= SAFE_TOKENS) endWell()
  }

  /** Call it when an answer is complete, however short. The next start keeps the setting. */
  fun endWell() {
    if (record.state == "first tokens") write(record.copy(state = "ended well", failures = 0))
  }

  private fun decided(last: Record?): Record {
    if (last == null) return Record(0, "opening", 0, "")
    val step = minOf(last.step, settings.size - 1)
    if (last.state == "ended well" || last.state == "open") return last.copy(step = step, state = "opening")
    val failures = last.failures + 1
    if (failures <= FAILURES_ALLOWED) return Record(step, "opening", failures, last.note)
    val smaller = minOf(step + 1, settings.size - 1)
    val moment = if (last.state == "opening") "while it was opened" else "at the first tokens"
    val died = "$failures starts in a row died, the last $moment (${settings[step]})"
    val now = if (smaller > step) "opened smaller: ${settings[smaller]}" else "there is nothing smaller to open"
    val said = "$died; $now".replace("\\", "\\\\").replace("\"", "\\\"")
    return Record(smaller, "opening", failures, said)
  }

  /** The record of the last start; null for a first start, another artifact or a damaged file. */
  private fun read(): Record? {
    if (!file.isFile || file.length() > MOST_BYTES) return null
    val found = FORMAT.matchEntire(file.readText()) ?: return null
    val (sha256, step, state, failures, note) = found.destructured
    return if (sha256 == artifact) Record(step.toInt(), state, failures.toInt(), note) else null
  }

  private fun write(changed: Record) {
    record = changed
    val (step, state, failures, note) = changed
    val start = """"step":$step,"state":"$state","failures":$failures,"note":"$note""""
    val part = File(file.path + ".part")
    FileOutputStream(part).use {
      it.write("""{"version":1,"artifact":"$artifact",$start}""".toByteArray())
      it.fd.sync()
    }
    if (!part.renameTo(file)) throw IOException("$file cannot be written")
  }

  private companion object {
    val FORMAT =
      Regex(
        """\{"version":1,"artifact":"([0-9a-f]{64})","step":(\d{1,2}|100),""" +
          """"state":"(opening|open|first tokens|ended well)","failures":(\d{1,9}),""" +
          """"note":"([^"\\]*+(?:\\.[^"\\]*+)*+)"\}"""
      )
  }
}
