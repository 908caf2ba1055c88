// A backend of Triton whose models give back their inputs: x... comes back as y... .
//
// Of Triton's C API only what it needs is declared here; the server that loads it has the rest.
#include <cstdint>
#include <cstring>
#include <string>

extern "C" {

struct TRITONSERVER_Error;
struct TRITONBACKEND_Input;
struct TRITONBACKEND_ModelInstance;
struct TRITONBACKEND_Output;
struct TRITONBACKEND_Request;
struct TRITONBACKEND_Response;

TRITONSERVER_Error* TRITONBACKEND_RequestInputCount(TRITONBACKEND_Request*, uint32_t*);
TRITONSERVER_Error* TRITONBACKEND_RequestInputByIndex(TRITONBACKEND_Request*, uint32_t, TRITONBACKEND_Input**);
TRITONSERVER_Error* TRITONBACKEND_RequestRelease(TRITONBACKEND_Request*, uint32_t flags);
TRITONSERVER_Error* TRITONBACKEND_InputProperties(
    TRITONBACKEND_Input*, const char** name, int* datatype, const int64_t** shape, uint32_t* dims, uint64_t* size,
    uint32_t* buffers);
TRITONSERVER_Error* TRITONBACKEND_InputBuffer(
    TRITONBACKEND_Input*, uint32_t index, const void**, uint64_t* size, int* memory, int64_t* memory_id);
TRITONSERVER_Error* TRITONBACKEND_ResponseNew(TRITONBACKEND_Response**, TRITONBACKEND_Request*);
TRITONSERVER_Error* TRITONBACKEND_ResponseOutput(
    TRITONBACKEND_Response*, TRITONBACKEND_Output**, const char* name, int datatype, const int64_t* shape,
    uint32_t dims);
TRITONSERVER_Error* TRITONBACKEND_OutputBuffer(
    TRITONBACKEND_Output*, void**, uint64_t size, int* memory, int64_t* memory_id);
TRITONSERVER_Error* TRITONBACKEND_ResponseSend(TRITONBACKEND_Response*, uint32_t flags, TRITONSERVER_Error*);

const uint32_t kFinal = 1, kReleaseAll = 1;

static TRITONSERVER_Error* give_back(TRITONBACKEND_Response* response, TRITONBACKEND_Input* input) {
  const char* name;
  const int64_t* shape;
  uint32_t dims, buffers;
  uint64_t size;
  int datatype, memory = 0;
  int64_t memory_id = 0;
  if (auto* error = TRITONBACKEND_InputProperties(input, &name, &datatype, &shape, &dims, &size, &buffers)) return error;
  std::string given(name);
  given[0] = 'y';
  TRITONBACKEND_Output* output;
  if (auto* error = TRITONBACKEND_ResponseOutput(response, &output, given.c_str(), datatype, shape, dims)) return error;
  void* to;
  if (auto* error = TRITONBACKEND_OutputBuffer(output, &to, size, &memory, &memory_id)) return error;
  for (uint32_t i = 0; i < buffers; i++) {
    const void* from;
    uint64_t part;
    if (auto* error = TRITONBACKEND_InputBuffer(input, i, &from, &part, &memory, &memory_id)) return error;
    std::memcpy(to, from, part);
    to = static_cast<char*>(to) + part;
  }
  return nullptr;
}

static TRITONSERVER_Error* answer(TRITONBACKEND_Response* response, TRITONBACKEND_Request* request) {
  uint32_t count;
  if (auto* error = TRITONBACKEND_RequestInputCount(request, &count)) return error;
  for (uint32_t i = 0; i < count; i++) {
    TRITONBACKEND_Input* input;
    if (auto* error = TRITONBACKEND_RequestInputByIndex(request, i, &input)) return error;
    if (auto* error = give_back(response, input)) return error;
  }
  return nullptr;
}

__attribute__((visibility("default"))) TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance*, TRITONBACKEND_Request** requests, const uint32_t count) {
  for (uint32_t i = 0; i < count; i++) {
    TRITONBACKEND_Response* response;
    if (auto* error = TRITONBACKEND_ResponseNew(&response, requests[i])) return error;
    TRITONBACKEND_ResponseSend(response, kFinal, answer(response, requests[i]));
    TRITONBACKEND_RequestRelease(requests[i], kReleaseAll);
  }
  return nullptr;
}

}  // extern "C"
