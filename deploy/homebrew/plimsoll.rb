# Homebrew's formula: a tap carries this file as Formula/plimsoll.rb. It builds the head of the repository; a release adds
# `url` and `sha256` of its source archive.
class Plimsoll < Formula
  desc "LLM serving engine that plans every byte before it is ready"
  homepage "https://github.com/plimsoll-engine/plimsoll"
  license "Apache-2.0"
  head "https://github.com/plimsoll-engine/plimsoll.git", branch: "main"

  depends_on "rust" => :build

  def install
    system "cargo", "install", *std_cargo_args(path: "crates/plimsoll")
  end

  service do
    run [opt_bin/"plimsoll", "serve"]
    keep_alive successful_exit: false
    log_path var/"log/plimsoll.log"
    error_log_path var/"log/plimsoll.log"
  end

  test do
    assert_match "does not fit", shell_output("#{bin}/plimsoll plan demo --memory-budget 1MiB 2>&1", 2)
  end
end
