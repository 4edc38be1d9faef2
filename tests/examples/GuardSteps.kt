// Drives CrashGuard.kt by words from standard input: one start of an app a line, as FILE, artifact, settings and calls.
import com.example.edgekit.CrashGuard
import java.io.File

fun main() {
  for (line in generateSequence(::readlnOrNull)) {
    val (file, artifact, settings, calls) = line.split("\t")
    val guard = CrashGuard(File(file), artifact, settings.split("|"))
    for (call in calls.split(" ")) {
      when (call) {
        "begin" -> guard.begin()
        "opened" -> guard.opened()
        "before" -> guard.beforeTokens()
        "end" -> guard.endWell()
        else -> guard.afterTokens(call.toInt())
      }
    }
    println("${guard.step}\t${guard.note}")
  }
}
