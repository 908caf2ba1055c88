// A closed-loop load of prepared unary calls, by gRPC's own C++ client; bench/native.py writes the file of requests.
//
// native TARGET PATH REQUESTS LATENCIES CONNECTIONS IN_FLIGHT SECONDS
//
// Writes the latencies in seconds, as doubles, and prints the seconds from the first call to the last answer. At the
// first answer that is an error, or does not hold what its request says, it prints that and ends with 1.
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

struct Request {
  uint32_t timeout;  // Milliseconds; 0: none.
  std::vector<std::pair<std::string, std::string>> metadata;
  std::string message;
  std::vector<std::string> holds;
};

// Numbers have four bytes, and texts their lengths before them.
class Reader {
 public:
  explicit Reader(const char* path) {
    std::ifstream file(path, std::ios::binary);
    data_.assign(std::istreambuf_iterator<char>(file), {});
  }
  bool more() const { return at_ < data_.size(); }
  uint32_t number() {
    uint32_t value = 0;
    for (int i = 0; i < 4; i++) value |= uint32_t(uint8_t(data_.at(at_++))) << 8 * i;
    return value;
  }
  std::string text() {
    size_t size = number(), begin = at_;
    at_ += size;
    return data_.substr(begin, size);
  }

 private:
  std::string data_;
  size_t at_ = 0;
};

std::vector<Request> read(const char* path) {
  std::vector<Request> requests;
  for (Reader reader(path); reader.more();) {
    Request one;
    one.timeout = reader.number();
    for (uint32_t left = reader.number(); left; left--) {
      std::string name = reader.text();
      one.metadata.emplace_back(name, reader.text());
    }
    one.message = reader.text();
    for (uint32_t left = reader.number(); left; left--) one.holds.push_back(reader.text());
    requests.push_back(std::move(one));
  }
  return requests;
}

struct Call {
  grpc::GenericStub* stub;
  const Request* request = nullptr;
  std::unique_ptr<grpc::ClientContext> context;
  std::unique_ptr<grpc::GenericClientAsyncResponseReader> rpc;
  grpc::ByteBuffer answer;
  grpc::Status status;
  Clock::time_point began;

  void start(const Request& next, const std::string& path, grpc::CompletionQueue& queue) {
    request = &next;
    context = std::make_unique<grpc::ClientContext>();
    for (const auto& [name, value] : next.metadata) context->AddMetadata(name, value);
    if (next.timeout)
      context->set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(next.timeout));
    grpc::Slice slice(next.message);
    began = Clock::now();
    rpc = stub->PrepareUnaryCall(context.get(), path, grpc::ByteBuffer(&slice, 1), &queue);
    rpc->StartCall();
    rpc->Finish(&answer, &status, this);
  }

  std::string wrong() const {
    if (!status.ok())
      return "status " + std::to_string(status.error_code()) + ": " + status.error_message();
    std::vector<grpc::Slice> slices;
    std::string whole;
    if (!answer.Dump(&slices).ok()) return "an answer without a message";
    for (const auto& slice : slices) whole.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
    for (const auto& part : request->holds)
      if (whole.find(part) == std::string::npos) return "the reply does not hold its request's id or values";
    return "";
  }
};

}  // namespace

int main(int count, char** words) {
  if (count != 8) return 2;
  const std::string target = words[1], path = words[2];
  const auto requests = read(words[3]);
  const int connections = std::atoi(words[5]), in_flight = std::atoi(words[6]);
  const std::chrono::duration<double> length(std::atof(words[7]));

  std::vector<std::unique_ptr<grpc::GenericStub>> stubs;
  for (int i = 0; i < connections; i++) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // A connection of its own.
    arguments.SetMaxReceiveMessageSize(-1);
    auto channel = grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments);
    if (!channel->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(10)))
      return std::puts("nobody listens"), 1;
    stubs.push_back(std::make_unique<grpc::GenericStub>(channel));
  }
  grpc::CompletionQueue queue;
  size_t turn = std::random_device()() % requests.size();
  auto next = [&]() -> const Request& { return requests[turn++ % requests.size()]; };
  std::vector<Call> calls(in_flight);
  std::vector<double> latencies;
  const auto began = Clock::now();
  auto last = began;
  for (int i = 0; i < in_flight; i++) {
    calls[i].stub = stubs[i % connections].get();
    calls[i].start(next(), path, queue);
  }
  void* tag;
  bool good;
  for (int open = in_flight; open && queue.Next(&tag, &good);) {
    auto& call = *static_cast<Call*>(tag);
    last = Clock::now();
    if (auto text = call.wrong(); !text.empty()) {
      std::printf("after %zu good answers: %s\n", latencies.size(), text.c_str());
      std::fflush(stdout);
      std::_Exit(1);
    }
    latencies.push_back(std::chrono::duration<double>(last - call.began).count());
    call.answer.Clear();
    if (last - began < length)
      call.start(next(), path, queue);
    else
      open--;
  }
  std::ofstream(words[4], std::ios::binary)
      .write(reinterpret_cast<const char*>(latencies.data()), latencies.size() * sizeof(double));
  std::printf("%.6f\n", std::chrono::duration<double>(last - began).count());
}
