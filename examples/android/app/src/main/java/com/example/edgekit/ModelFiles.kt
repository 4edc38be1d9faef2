// Downloads the files of an artifact: resumed where it stopped, checked by hash, switched to in one step.
package com.example.edgekit

import java.io.File
import java.io.FileOutputStream
import java.io.IOException
import java.net.HttpURLConnection
import java.net.URL
import java.security.MessageDigest
import org.json.JSONObject

/**
 * An artifact at [site], as plain files. [manifestSha256] is built into the app: manifest.json holds the hashes of all
 * other files, so nothing else needs to be trusted. chat_format.json lies in the app's assets.
 */
class ModelFiles(private val site: String, private val manifestSha256: String, private val folder: File) {
  private val finished = File(folder, manifestSha256)

  /** The folder of the whole artifact; null while it is not there. */
  fun ready(): File? = finished.takeIf { it.isDirectory }

  /** Fetch what is missing, and return the folder. Call it from a worker, on a network that is not metered. */
  fun fetch(onBytes: (Long) -> Unit): File {
    ready()?.let { return it }
    val staging = File(folder, "$manifestSha256.part").apply { mkdirs() }
    val manifest = fetchOne(File(staging, "manifest.json"), manifestSha256, null, onBytes)
    val files = JSONObject(manifest.readText()).getJSONObject("files")
    for (name in files.keys()) {
      val entry = files.getJSONObject(name)
      if (name.contains('/') || name.contains('\\') || name.startsWith(".")) throw IOException("$name: a bad name")
      fetchOne(File(staging, name), entry.getString("sha256"), entry.getLong("bytes"), onBytes)
    }
    if (!staging.renameTo(finished)) throw IOException("$finished could not be made")
    return finished
  }

  private fun fetchOne(file: File, sha256: String, bytes: Long?, onBytes: (Long) -> Unit): File {
    if (file.exists() && sha256Of(file) == sha256) return file
    if (bytes != null && file.length() >= bytes) file.delete() // whole, but damaged
    val begun = file.length()
    val connection = URL("$site/${file.name}").openConnection() as HttpURLConnection
    connection.connectTimeout = 30_000
    connection.readTimeout = 30_000
    connection.instanceFollowRedirects = false
    if (begun > 0) connection.setRequestProperty("Range", "bytes=$begun-")
    try {
      val isPart = connection.responseCode == HttpURLConnection.HTTP_PARTIAL
      if (!isPart && connection.responseCode != HttpURLConnection.HTTP_OK) {
        throw IOException("${file.name}: the server answered ${connection.responseCode}")
      }
      connection.inputStream.use { from -> FileOutputStream(file, isPart).use { to -> copy(from::read, to, onBytes) } }
    } finally {
      connection.disconnect()
    }
    if (sha256Of(file) != sha256) {
      file.delete()
      throw IOException("${file.name}: other bytes than the manifest says")
    }
    return file
  }

  private fun copy(read: (ByteArray) -> Int, to: FileOutputStream, onBytes: (Long) -> Unit) {
    val buffer = ByteArray(1 shl 16)
    while (true) {
      val count = read(buffer)
      if (count < 0) break
      to.write(buffer, 0, count)
      onBytes(count.toLong())
    }
    to.fd.sync()
  }

  private fun sha256Of(file: File): String {
    val digest = MessageDigest.getInstance("SHA-256")
    val buffer = ByteArray(1 shl 16)
    file.inputStream().use { from ->
      while (true) {
        val count = from.read(buffer)
        if (count < 0) break
        digest.update(buffer, 0, count)
      }
    }
    return digest.digest().joinToString("") { "%02x".format(it) }
  }
}
