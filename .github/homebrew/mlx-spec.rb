# A formula for a tap of your own. The workflow of a tag puts the owner of the repository, the version and the
# checksum in and adds it to the release: copy that one to Formula/mlx-spec.rb of the tap.
class MlxSpec < Formula
  desc "Lossless speculative decoding for local language models"
  homepage "https://github.com/OWNER/mlx-spec"
  url "https://github.com/OWNER/mlx-spec/releases/download/v0.1.0/mlx_spec-0.1.0.tar.gz"
  sha256 "0000000000000000000000000000000000000000000000000000000000000000"
  license "Apache-2.0"
  head "https://github.com/OWNER/mlx-spec.git", branch: "main"

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "python@3.12"

  # The libraries in wheels have identifiers with @rpath, and no room for the longer ones that Homebrew would write.
  preserve_rpath

  def install
    # MLX comes as a wheel with its Metal kernels: building it from source takes Xcode.
    system Formula["python@3.12"].opt_bin/"python3.12", "-m", "venv", libexec
    # Without the menu bar: macOS 26 draws no item for a framework build of Python, which Homebrew's is.
    system libexec/"bin/python", "-m", "pip", "install", "--quiet", "#{buildpath}[server]"
    bin.install_symlink libexec/"bin/mlx-spec"
  end

  def caveats
    <<~EOS
      The menu bar needs another build of Python than Homebrew's:
        uv tool install --managed-python 'mlx-spec[server,menubar]'
    EOS
  end

  service do
    run [opt_bin/"mlx-spec", "serve"]
    keep_alive true
    process_type :interactive # launchd slows background processes
    log_path var/"log/mlx-spec.log"
    error_log_path var/"log/mlx-spec.log"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/mlx-spec --version")
    assert_match "demo", shell_output("#{bin}/mlx-spec models")
  end
end
