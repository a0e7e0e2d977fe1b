#include "base/host_list.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/support/status.h"

namespace kvferry {
namespace {

TEST(HostList, AnAddressIsItselfHoweverItIsWritten) {
  EXPECT_TRUE(HostListAdmits("10.0.0.7", "10.0.0.7"));
  EXPECT_FALSE(HostListAdmits("10.0.0.7", "10.0.0.70"));
  EXPECT_TRUE(HostListAdmits("fd00::1", "fd00:0:0::1"));
  EXPECT_TRUE(HostListAdmits("[fd00::1]", "fd00::1"));
  EXPECT_FALSE(HostListAdmits("fd00::1", "fd00::2"));
}

TEST(HostList, ANetworkHasItsAddresses) {
  for (const char* host : {"10.1.0.0", "10.1.2.3", "10.1.255.255"}) {
    EXPECT_TRUE(HostListAdmits("192.0.2.1, 10.1.0.0/16", host)) << host;
  }
  for (const char* host : {"10.0.255.255", "10.2.0.0", "11.1.0.0", "::ffff:10.1.2.3", "name",
                           "10.1.2", "0x0a.1.2.3"}) {
    EXPECT_FALSE(HostListAdmits("192.0.2.1, 10.1.0.0/16", host)) << host;
  }
  EXPECT_TRUE(HostListAdmits("10.1.2.3/16", "10.1.9.9"));  // Whatever its other bits are.
  EXPECT_TRUE(HostListAdmits("172.16.0.0/12", "172.31.255.255"));
  EXPECT_FALSE(HostListAdmits("172.16.0.0/12", "172.32.0.0"));
  EXPECT_TRUE(HostListAdmits("fd00::/8", "fdff::1"));
  EXPECT_FALSE(HostListAdmits("fd00::/8", "fe80::1"));
  EXPECT_TRUE(HostListAdmits("0.0.0.0/0", "8.8.8.8"));
  EXPECT_FALSE(HostListAdmits("0.0.0.0/0", "fd00::1"));
}

TEST(HostList, ANameIsComparedAsItIs) {
  EXPECT_TRUE(HostListAdmits("prefill-0, prefill-1", "prefill-1"));
  EXPECT_FALSE(HostListAdmits("prefill-0", "prefill-01"));
  EXPECT_TRUE(HostListAdmits("*", "anything.example"));
  EXPECT_FALSE(HostListAdmits("", "10.0.0.1"));
  EXPECT_FALSE(HostListAdmits("10.0.0.0/8", std::string("10.0.0.1\0.example.com", 21)));
}

TEST(HostList, WhatCouldAdmitNobodyIsNamed) {
  EXPECT_TRUE(IsOk(CheckHostList("")));
  EXPECT_TRUE(IsOk(CheckHostList(" 10.0.0.7, fd00::1,10.0.0.0/8 ,fd00::/8, store.example.com, *")));
  EXPECT_TRUE(IsOk(CheckHostList("fe80::1%eth0, [fd00::2], ::1")));
  for (const char* entry :
       {"10.0.0.*", "*.example.com", "10.0.0.0/33", "fd00::/129", "10.0.0.0/", "10.0.0.0/-1",
        "10.0.0.0/8/8", "name/8", "/8", "10.0.0.1:7700", "store.example.com:7700", "[fd00::1]:7700",
        "tcp://10.0.0.2", "fe80::1%eth0/64", "fe80::%eth0/64", "fd00::1%x/999", "fe80::1%eth0:7700",
        "[fd00::1"}) {
    EXPECT_TRUE(Fails(CheckHostList(std::string("10.0.0.1,") + entry),
                      absl::StatusCode::kInvalidArgument, entry))
        << entry;
  }
}

TEST(HostList, HostsThatNoCommaPartsAreNamed) {
  for (const char* entry : {"10.0.0.2 10.0.0.3", "10.0.0.2;10.0.0.3", "prefill-0\nprefill-1"}) {
    EXPECT_TRUE(Fails(CheckHostList(std::string("10.0.0.1,") + entry),
                      absl::StatusCode::kInvalidArgument, entry, "commas"))
        << entry;
  }
}

}  // namespace
}  // namespace kvferry
