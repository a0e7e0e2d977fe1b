#include "transport/control/curve.h"

#include <zmq.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <vector>
#include <zmq_addon.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/secret_file.h"
#include "base/sha256.h"
#include "base/status.h"

namespace kvferry {
namespace {

constexpr char kDomain[] = "kvferry";
constexpr int kZapEnforceDomain = 93;  // ZMQ_ZAP_ENFORCE_DOMAIN, which zmq.h has among drafts only.
constexpr char kQuestions[] = "inproc://zeromq.zap.01";  // Where ZeroMQ asks.
constexpr size_t kDigits = 64;
// Of a question: version, id, domain, address, routing id, mechanism, and the public key that was
// shown.
constexpr size_t kIdAt = 1;
constexpr size_t kMechanismAt = 5;
constexpr size_t kKeyAt = 6;
constexpr size_t kQuestionFrames = 7;

absl::StatusOr<std::string> ReadKey(const std::string& key_file) {
  KVFERRY_ASSIGN_OR_RETURN(std::string text, ReadSecretFile("key_file", key_file));
  absl::StripAsciiWhitespace(&text);
  const bool is_hex = std::all_of(text.begin(), text.end(), absl::ascii_isxdigit);
  if (text.size() != kDigits || !is_hex) {
    return absl::InvalidArgumentError(absl::StrCat(
        "key_file '", key_file, "' does not hold ", kDigits,
        " hexadecimal digits, and nothing else; 'openssl rand -hex 32' makes such a key"));
  }
  return absl::HexStringToBytes(text);
}

absl::StatusOr<CurveKeys::Pair> PairOf(const std::string& key, absl::string_view label) {
  CurveKeys::Pair pair;
  KVFERRY_ASSIGN_OR_RETURN(pair.secret, HmacSha256(key, {label.data(), label.size()}));
  // ZeroMQ makes public keys in its text form only.
  std::array<char, 41> secret_text{};
  std::array<char, 41> open_text{};
  zmq_z85_encode(secret_text.data(), pair.secret.data(), pair.secret.size());
  if (zmq_curve_public(open_text.data(), secret_text.data()) != 0) {
    return absl::UnimplementedError("keys: this ZeroMQ was built without CURVE (libsodium)");
  }
  zmq_z85_decode(pair.open.data(), open_text.data());
  return pair;
}

void SetKey(zmq::socket_t& socket, int option, const CurveKeys::Key& key) {
  if (zmq_setsockopt(socket.handle(), option, key.data(), key.size()) != 0) throw zmq::error_t();
}

}  // namespace

absl::StatusOr<CurveKeys> ReadCurveKeys(const std::string& key_file) {
  KVFERRY_ASSIGN_OR_RETURN(const std::string key, ReadKey(key_file));
  CurveKeys keys;
  KVFERRY_ASSIGN_OR_RETURN(keys.listener, PairOf(key, "kvferry 1 listener"));
  KVFERRY_ASSIGN_OR_RETURN(keys.dialler, PairOf(key, "kvferry 1 dialler"));
  return keys;
}

Doorkeeper::Doorkeeper(zmq::context_t& context, const CurveKeys& keys)
    : keys_(keys), questions_(context, zmq::socket_type::rep) {
  questions_.set(zmq::sockopt::linger, 0);
  questions_.bind(kQuestions);
}

void Doorkeeper::Guard(zmq::socket_t& listener) const {
  listener.set(zmq::sockopt::curve_server, 1);
  SetKey(listener, ZMQ_CURVE_SECRETKEY, keys_.listener.secret);
  // Without a domain that is enforced, and somebody to ask, ZeroMQ takes whoever knows the public
  // key.
  listener.set(zmq::sockopt::zap_domain, kDomain);
  const int enforce = 1;
  if (zmq_setsockopt(listener.handle(), kZapEnforceDomain, &enforce, sizeof enforce) != 0) {
    throw zmq::error_t();
  }
}

void Doorkeeper::Introduce(zmq::socket_t& dialler) const {
  SetKey(dialler, ZMQ_CURVE_SERVERKEY, keys_.listener.open);
  SetKey(dialler, ZMQ_CURVE_PUBLICKEY, keys_.dialler.open);
  SetKey(dialler, ZMQ_CURVE_SECRETKEY, keys_.dialler.secret);
}

void Doorkeeper::Answer() {
  const CurveKeys::Key& known = keys_.dialler.open;
  for (;;) {
    std::vector<zmq::message_t> question;
    if (!zmq::recv_multipart(questions_, std::back_inserter(question), zmq::recv_flags::dontwait)) {
      return;
    }
    const bool whole = question.size() == kQuestionFrames;
    const bool ours = whole && question[kMechanismAt].to_string_view() == "CURVE" &&
                      question[kKeyAt] == zmq::message_t(known.data(), known.size());
    const std::array<zmq::const_buffer, 6> answer = {
        zmq::buffer("1.0", 3),
        whole ? zmq::buffer(question[kIdAt].data(), question[kIdAt].size()) : zmq::buffer("", 0),
        ours ? zmq::buffer("200", 3) : zmq::buffer("400", 3),
        ours ? zmq::buffer("OK", 2) : zmq::buffer("no such key", 11),
        zmq::buffer("", 0),
        zmq::buffer("", 0)};
    (void)zmq::send_multipart(questions_, answer, zmq::send_flags::dontwait);
  }
}

}  // namespace kvferry
