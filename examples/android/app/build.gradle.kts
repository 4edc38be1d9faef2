plugins {
  id("com.android.application")
  id("org.jetbrains.kotlin.android")
}

android {
  namespace = "com.example.edgekit"
  compileSdk = 35

  defaultConfig {
    applicationId = "com.example.edgekit"
    minSdk = 28
    targetSdk = 35
    versionCode = 1
    versionName = "1.0"
    ndk { abiFilters += listOf("arm64-v8a", "x86_64") } // the library has no others; drop x86_64 in a release
  }

  compileOptions {
    sourceCompatibility = JavaVersion.VERSION_17
    targetCompatibility = JavaVersion.VERSION_17
  }

  kotlinOptions { jvmTarget = "17" }

  androidResources { noCompress += "pte" }
}

dependencies {
  // The version that manifest.json of your artifact names under "tools".
  implementation("org.pytorch:executorch-android:1.5.1")
}
