#pragma once

#include <string>

#include "transport/control_plane.h"
#include "transport/data_plane.h"

namespace kvferry {

// What the sender, the receiver and calls need of the node they live in. Progress thread only.
class Outbox {
 public:
  virtual ~Outbox() = default;
  // Stamps the epochs and sends; messages to one peer arrive in order. A peer that takes none is
  // declared dead, later and elsewhere.
  virtual void Send(const PeerKey& peer, MessageBody body) = 0;
  // Whether what can wait, a call or a fetch, should be sent now. If not, OnPeerReady() comes when
  // it should, so that a burst of them never becomes more than the peer is given to take, and
  // nothing counts as asked that a link which never opens has kept.
  virtual bool HasRoom(const PeerKey& peer) = 0;
  // Why nothing can be asked there, as far as attempts to connect have shown; empty: they have not,
  // or have succeeded.
  virtual std::string WhyUnreachable(const PeerKey& /*peer*/) { return ""; }
  virtual ChunkLinks& data() = 0;
};

}  // namespace kvferry
