# A formula for a tap of your own: copy it to Formula/mlx-spec.rb there, and put the owner of the repository and
# the checksum in. The workflow of a tag prints the checksum of the sdist.
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

  def install
    # MLX comes as a wheel with its Metal kernels: building it from source takes Xcode.
    system Formula["python@3.12"].opt_bin/"python3.12", "-m", "venv", libexec
    system libexec/"bin/python", "-m", "pip", "install", "--quiet", "#{buildpath}[server,menubar]"
    bin.install_symlink libexec/"bin/mlx-spec"
  end

  service do
    run [opt_bin/"mlx-spec", "serve"]
    keep_alive true
    log_path var/"log/mlx-spec.log"
    error_log_path var/"log/mlx-spec.log"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/mlx-spec --version")
    assert_match "demo", shell_output("#{bin}/mlx-spec models")
  end
end
