// Makes calls with gRPC for C++, without generated code.
#include <absl/strings/escaping.h>
#include <absl/strings/match.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <zlib.h>

#include <chrono>
#include <cstdint>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

using nlohmann::json;
using std::string;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kBlock = 65521;
const char* const kCodes[] = {"OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND",
                              "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
                              "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS",
                              "UNAUTHENTICATED"};
const std::map<string, grpc_compression_algorithm> kCompression = {
    {"", GRPC_COMPRESS_NONE}, {"gzip", GRPC_COMPRESS_GZIP}, {"deflate", GRPC_COMPRESS_DEFLATE}};
const char* const kRetries = R"({"methodConfig": [{"name": [{}], "retryPolicy": {
    "maxAttempts": 4, "initialBackoff": "0.1s", "maxBackoff": "1s", "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"]}}]})";

string decoded(const string& text) {
    string bytes;
    if (!absl::Base64Unescape(text, &bytes)) throw std::invalid_argument("not base64: " + text);
    return bytes;
}

string content(const string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

std::shared_ptr<grpc::Channel> open_channel(const json& connection) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    if (const int milliseconds = connection["keepalive_ms"]) {
        arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, milliseconds);
        arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
    }
    if (connection["retries"]) arguments.SetServiceConfigJSON(kRetries);
    auto credentials = grpc::InsecureChannelCredentials();
    if (connection["ca"] != "")
        credentials = grpc::SslCredentials(
            {content(connection["ca"]), content(connection["key"]), content(connection["certificate"])});
    return grpc::CreateCustomChannel(connection["address"], credentials, arguments);
}

// A request's bytes: its head, and the pattern that `fill` stands for.
grpc::ByteBuffer request(const json& described) {
    string bytes = decoded(described["head"]);
    const std::size_t begin = bytes.size(), size = described.value("fill", 0);
    bytes.resize(begin + size);
    std::uint32_t x = 1;
    for (std::size_t at = 0; at < size; at++)
        bytes[begin + at] = at < kBlock ? (x = x * 1664525 + 1013904223) >> 24 : bytes[begin + at - kBlock];
    const grpc::Slice slice(bytes);
    return {&slice, 1};
}

json response(const grpc::ByteBuffer& message, std::size_t tail) {
    std::vector<grpc::Slice> slices;
    message.Dump(&slices);
    string bytes;
    for (const auto& slice : slices) bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
    const std::size_t cut = bytes.size() - tail;
    const auto* end = reinterpret_cast<const Bytef*>(bytes.data()) + cut;
    return {{"head", absl::Base64Escape(bytes.substr(0, cut))}, {"crc32", crc32(0, end, tail)}};
}

json make(grpc::GenericStub& stub, const json& call) {
    grpc::ClientContext context;  // Its end cancels a call that has not ended: C++'s way to leave a stream.
    if (call.contains("timeout_ms"))
        context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(call["timeout_ms"]));
    for (const auto& pair : call.value("metadata", json::array())) {
        const string name = pair[0], value = pair[1];
        context.AddMetadata(name, absl::EndsWith(name, "-bin") ? decoded(value) : value);
    }
    context.set_compression_algorithm(kCompression.at(call.value("compression", "")));
    const string method = call["method"], kind = call["kind"];
    const json& requests = call["requests"];
    json result = {{"responses", json::array()}, {"trailers", json::object()}};
    json& responses = result["responses"];
    grpc::ByteBuffer message;
    grpc::Status status;
    grpc::CompletionQueue queue;
    const auto wait = [&queue] {  // For the operation that was started; returns whether it succeeded.
        void* tag;
        bool ok = false;
        return queue.Next(&tag, &ok) && ok;
    };
    if (kind == "unary") {
        const auto rpc = stub.PrepareUnaryCall(&context, method, request(requests[0]), &queue);
        rpc->StartCall();
        rpc->Finish(&message, &status, nullptr);
        wait();
        if (status.ok()) responses.push_back(response(message, call.value("tail", 0)));
    } else {
        const auto rpc = stub.PrepareCall(&context, method, &queue);
        rpc->StartCall(nullptr);
        wait();
        std::size_t sent = 0;
        const auto send = [&] {
            if (sent < requests.size())
                rpc->Write(request(requests[sent]), nullptr);
            else
                rpc->WritesDone(nullptr);
            wait();
            sent++;
        };
        const bool turns = call.value("turns", false);
        while (sent < (turns ? 1 : requests.size() + 1)) send();
        while (rpc->Read(&message, nullptr), wait()) {
            responses.push_back(response(message, call.value("tail", 0)));
            if (turns) send();
            if (responses.size() == call.value("leave_after", 0u)) {
                result.update({{"code", "LEFT"}, {"message", ""}});
                return result;
            }
            if (responses.size() == call.value("cancel_after", 0u)) context.TryCancel();
        }
        rpc->Finish(&status, nullptr);
        wait();
    }
    result.update({{"code", kCodes[status.error_code()]}, {"message", status.error_message()}});
    for (const auto& [key, value] : context.GetServerTrailingMetadata()) {
        const string name(key.data(), key.size()), bytes(value.data(), value.size());
        result["trailers"][name] = absl::EndsWith(name, "-bin") ? absl::Base64Escape(bytes) : bytes;
    }
    return result;
}

// Makes a call, or makes it again and again: the result is that of the first that failed, or of the last.
json repeat(grpc::GenericStub& stub, const json& call) {
    const auto end = Clock::now() + std::chrono::duration<double>(call.value("repeat_seconds", 0.0));
    std::map<string, int> codes;
    json shown;
    do {
        json last = make(stub, call);
        codes[last["code"]]++;
        if (shown.is_null() || shown["code"] == "OK") shown = std::move(last);
    } while (Clock::now() < end);
    shown["codes"] = codes;
    return shown;
}

int main(int, char** words) {
    grpc::GenericStub stub(open_channel(json::parse(words[1])));
    for (string line; std::getline(std::cin, line);) std::cout << repeat(stub, json::parse(line)) << std::endl;
}
